"""The cut of a block's sequence over a context axis: which dims of its arguments are the sequence, and why not if not.

Found on the block's graph by the correspondence of dims (`factors`) and the rules that follow from it, so never from
sizes that happen to agree: the activation is cut along one dim, parameters are whole and get summands of their
gradients, every operator computes on what its rank has, and attention alone may exchange. The dim is the one that
arrives as the queries of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galv.errors import ModelError
from galv.planner.capture.sample import UnitSample
from galv.planner.graph import Exclusion
from galv.planner.plan import ContextMode, Layout, SequenceLayout
from galv.planner.sharding.choices import Choice
from galv.planner.sharding.factors import argument, operator_name
from galv.planner.sharding.ilp import solve
from galv.planner.sharding.layout import traces_of
from galv.planner.sharding.operators import factors_of
from galv.planner.sharding.place import PARTIAL, USED, WHOLE, Place, divides, shard
from galv.planner.sharding.rehearse import Misfit, misfit_on_shards
from galv.planner.sharding.rules import Rule, rules, settled
from galv.planner.sharding.trace import Input, Node, Trace

ATTENTION = "scaled_dot_product_attention"
_EAGER = ("matmul", "bmm", "baddbmm", "softmax", "einsum")
"""What attention is made of where it is written out."""


def find_sequence_layout(
    unit: UnitSample, mode: ContextMode, degree: int, *, tp: int = 1
) -> SequenceLayout | Exclusion:
    """How `unit` runs with its sequence cut over `degree` ranks, each with a tensor axis of `tp`; or why it cannot.

    The layout has been run on the meta device.
    """
    if not unit.repeated or len(unit.calls) != 1:
        return Exclusion("only repeated blocks that are called once can be cut along the sequence")
    try:
        trace = traces_of(unit)[0]
    except ModelError as error:
        return Exclusion(str(error))
    reason = _hindrance(trace, mode, degree, tp)
    if reason is not None:
        return Exclusion(reason)
    reasons = []
    for dim in _dims(trace):
        found = _Search(trace, mode, degree, dim).layout(unit.unit_class)
        if isinstance(found, SequenceLayout):
            return found
        reasons.append(found)
    return Exclusion(reasons[0])


def _dims(trace: Trace) -> list[int]:
    """The dims of the activation that may be its sequence, the likely one first; the last is never, and 0 if nowhere
    else: samples are divided by data parallelism."""
    return [*range(1, max(len(trace.call.tensor().shape) - 1, 2)), 0]


# ----------------------------------------------------------------------------------------------- attention


def _attentions(trace: Trace) -> list[Node]:
    return [node for node in trace.nodes_of("operator") if node.target and operator_name(node.target) == ATTENTION]


def _is_causal(node: Node) -> bool:
    assert node.target is not None
    return bool(argument(node.target, 5, "is_causal", False))


def _hindrance(trace: Trace, mode: ContextMode, degree: int, tp: int) -> str | None:
    """What keeps the question from being asked at all."""
    if trace.hazards:
        return f"{type(trace.module).__name__}: {trace.hazards[0]}"
    if trace.call.activation is None:
        return "the block has no activation"
    if mode == "ring":
        return None
    for node in _attentions(trace):
        heads = trace.nodes[node.inputs[0]].shape[-3]
        if heads % (tp * degree):
            return f"ulysses over {degree} ranks needs a multiple of {tp * degree} heads, and attention has {heads}"
    return None


# ----------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class _Search:
    """The question whether the activation can be cut along `dim`."""

    trace: Trace
    mode: ContextMode
    degree: int
    dim: int

    @property
    def is_balanced(self) -> bool:
        return self.mode == "ring" and any(map(_is_causal, _attentions(self.trace)))

    def layout(self, unit_class: str) -> SequenceLayout | str:
        """The layout, or why there is none."""
        shape, pieces = tuple(self.trace.call.tensor().shape), self.degree * (1 + self.is_balanced)
        if self.dim >= len(shape) or shape[self.dim] % pieces:
            length = shape[self.dim] if self.dim < len(shape) else 1
            what = f"{pieces} chunks, two a rank, as causal ring attention needs" if self.is_balanced else f"{pieces}"
            return f"the sequence of {length} cannot be divided into {what}"
        options = self._options()
        if isinstance(options, str):
            return options
        chosen = solve(self.trace.nodes, options)
        if chosen is None:
            return f"no layout of the arguments cuts the sequence throughout {type(self.trace.module).__name__}"
        return self._written(unit_class, chosen)

    def _options(self) -> list[list[Choice]] | str:
        """For each node its possibilities, or what mixes the sequence."""
        found: list[list[Choice]] = []
        for node in self.trace.nodes:
            given = [{c.output for c in found[i] if c.output} for i in node.inputs]
            found.append(list(self._choices(node, given)))
            if not found[-1]:
                return self._mixes(node)
        return found

    def _choices(self, node: Node, given: list[set[Place]]) -> Iterator[Choice]:
        if node.kind == "input":
            yield from self._argument(node)
        elif node.kind in ("constant", "parameter"):
            yield Choice((), settled(USED, node.differentiable), stored=WHOLE if node.kind == "parameter" else None)
        elif node.kind == "border":
            yield from (Choice((place,), place) for place in sorted(given[0]))
        elif node.kind == "result":
            wanted = self._cut if node.index == self._activation else WHOLE
            yield from (Choice((place,), None) for place in given[0] if place == wanted)
        elif node.target is not None and operator_name(node.target) == ATTENTION:
            yield from self._attention(node, given)
        else:
            yield from self._operator(node, given)

    @property
    def _cut(self) -> Place:
        return shard(self.dim)

    @property
    def _activation(self) -> int | None:
        """The result that the next unit takes as its activation."""
        return next((node.index for node in self.trace.nodes_of("result") if node.differentiable), None)

    def _argument(self, node: Node) -> Iterator[Choice]:
        """Whole where that does; the activation is cut."""
        assert isinstance(node.mark, Input)
        if node.mark.name == self.trace.call.activation:
            yield Choice((), self._cut)
            return
        yield Choice((), settled(USED, node.differentiable))
        cuts = (shard(dim) for dim in range(len(node.shape)))
        yield from (Choice((), cut, seconds=1.0) for cut in cuts if divides(node.shape, cut, self.degree))

    def _operator(self, node: Node, given: list[set[Place]]) -> Iterator[Choice]:
        assert node.target is not None
        factors = factors_of(node.target, divides_rows=True)
        grads = [self.trace.nodes[i].differentiable for i in node.inputs]
        for rule in rules(factors, given, grads, node.differentiable, self.degree):
            if PARTIAL not in (*rule.inputs, rule.output):
                # A tensor made from nothing has the size of what it is made for.
                yield Choice(rule.inputs, rule.output, seconds=float(factors.is_uniform and not rule.is_cut))

    def _attention(self, node: Node, given: list[set[Place]]) -> Iterator[Choice]:
        grads = [self.trace.nodes[i].differentiable for i in node.inputs]
        for rule in _attention_rules(node, len(self.trace.nodes[node.inputs[0]].shape)):
            inputs = tuple(settled(place, grad) for place, grad in zip(rule.inputs, grads, strict=True))
            has_all = all(place in places for place, places in zip(inputs, given, strict=True))
            if has_all and not (rule.is_cut and any(grads[3:])):
                yield Choice(inputs, settled(rule.output, node.differentiable))

    # -- words

    def _mixes(self, node: Node) -> str:
        """Why `node` cannot run on a part of the sequence."""
        if node.kind == "result":
            return f"{type(self.trace.module).__name__} returns a part of the sequence beside its activation"
        name = operator_name(node.target) if node.target is not None else node.kind
        module = next((c.site.module for c in self.trace.calls if c.results and c.results[-1] >= node.index), "")
        where = f"{module or 'the block'} ({type(self.trace.module).__name__})"
        hint = f"; attention can be cut only as torch's {ATTENTION}, without a mask that is trained"
        return f"{name} in {where} mixes the sequence" + hint * (name in (*_EAGER, ATTENTION))

    # -- writing down

    def _written(self, unit_class: str, chosen: Sequence[Choice]) -> SequenceLayout | str:
        misfit = misfit_on_shards(self.trace, chosen, self.degree)
        if isinstance(misfit, Misfit):
            site = misfit.call.site
            return f"a part of the sequence cannot run {site.function} in {site.module or 'the block'}: {misfit.reason}"
        cut = [chosen[node.index].inputs for node in _attentions(self.trace)]
        if not any(inputs[0].is_sharded for inputs in cut) and (cut or self.dim != 1):
            return f"dim {self.dim} of the activation is no sequence that attention looks at"
        assert self.trace.call.activation is not None
        return SequenceLayout(
            unit_class=unit_class,
            mode=self.mode,
            degree=self.degree,
            balanced=self.is_balanced,
            arguments=self._arguments(chosen),
            activation=self.trace.call.activation,
            output_dim=self.dim,
            attention=tuple("exchanged" if inputs[1].is_sharded else "local" for inputs in cut),
        )

    def _arguments(self, chosen: Sequence[Choice]) -> dict[str, tuple[Layout, ...]]:
        found: dict[str, tuple[Layout, ...]] = {}
        for node in self.trace.nodes_of("input"):
            place = chosen[node.index].output
            assert isinstance(node.mark, Input)
            assert place is not None
            found[node.mark.name] = (*found.get(node.mark.name, ()), Layout.parse(str(place)))
        return found


def _attention_rules(node: Node, rank: int) -> Iterator[Rule]:
    """Attention of cut queries to cut keys exchanges; to whole keys it is local, unless a mask would have to be cut."""
    masks = (WHOLE,) * (len(node.inputs) - 3)
    queries = shard(rank - 2)
    if rank == 4:
        yield Rule((queries, queries, queries, *masks), queries, is_cut=True)
    if not masks and not _is_causal(node):
        yield Rule((queries, USED, USED), queries, is_cut=True)
    yield Rule((USED,) * len(node.inputs), USED)
    yield Rule((WHOLE,) * len(node.inputs), WHOLE)
