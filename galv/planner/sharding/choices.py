"""What each value of a trace may be, and what each possibility costs: the data of the program in `ilp`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from galv.planner.plan import SequenceMode
from galv.planner.sharding.factors import Factors
from galv.planner.sharding.operators import factors_of
from galv.planner.sharding.place import PARTIAL, USED, WHOLE, Place, can_change, divides, moved_share, shard
from galv.planner.sharding.rules import Rule, rules, settled
from galv.planner.sharding.trace import Border, Input, Node, OwnParameter, Trace


@dataclass(frozen=True)
class Rates:
    """Nominal abilities of a device, by which placements are compared; only their ratios matter.

    Whoever asks for a layout has already decided to divide the unit by `degree`, be it for speed or for memory. So
    the defaults are those of a device that is slow beside its links: work is divided unless that moves more bytes
    than it saves operations on any device.
    """

    flops_per_second: float = 2e12
    memory_bytes_per_second: float = 2e12
    link_bytes_per_second: float = 1e11
    state_bytes_per_byte: float = 4.0
    """What a stored parameter drags along through the links and the optimizer: gradient, master copy, moments."""


@dataclass(frozen=True)
class Choice:
    """One possibility for one node: how it takes its inputs and how its value lies."""

    inputs: tuple[Place, ...]
    output: Place | None
    """None for a result, which nothing takes."""
    seconds: float = 0.0
    rank: float = 0.0
    """Decides between equal seconds: less is better."""
    stored: Place | None = None
    """For a parameter, how it is kept between steps; `output` is how it is used."""

    @property
    def change(self) -> tuple[Place, Place] | None:
        """For a border, source and target; None when nothing changes there."""
        pair = (self.inputs[0], self.output) if self.inputs and self.output else None
        return pair if pair and pair[0] != pair[1] else None

    @property
    def is_sharded(self) -> bool:
        return any(place.is_sharded for place in (*self.inputs, *((self.output,) if self.output else ())))


@dataclass(frozen=True)
class Question:
    """What is asked about one trace."""

    trace: Trace
    degree: int
    sequence: SequenceMode = "none"
    rates: Rates = field(default_factory=Rates)
    stored: Mapping[int, Place] = field(default_factory=dict)
    """By identity: parameters whose storage is settled elsewhere."""
    whole: frozenset[int] = frozenset()
    """Nodes that may not be cut."""

    @property
    def activation(self) -> Place:
        """How the unit takes and gives its activation."""
        return shard(1) if self.sequence == "megatron" else WHOLE


def choices_of(question: Question) -> list[list[Choice]]:
    """For each node of the trace its possibilities, without those that no neighbour can go along with.

    A list is empty when the question has no answer.
    """
    maker = _Maker(question)
    found: list[list[Choice]] = []
    for node in question.trace.nodes:
        found.append(list(maker.make(node, [{c.output for c in found[i] if c.output} for i in node.inputs])))
    _prune(question.trace.nodes, found)
    return found


def factors_in(trace: Trace) -> dict[int, Factors]:
    """The factors of every operator of a trace, by node."""
    return {node.index: factors_of(node.target) for node in trace.nodes_of("operator") if node.target is not None}


class _Maker:
    """Makes the choices of one node out of what its inputs can be."""

    def __init__(self, question: Question) -> None:
        self.q = question
        self.factors = factors_in(question.trace)
        self.used = {i for node in question.trace.nodes for i in node.inputs}
        self.chunks = {1} | {n for factors in self.factors.values() for n in _chunk_counts(factors)}
        self.reads = Counter(getattr(node.mark, "identity", None) for node in question.trace.nodes_of("parameter"))
        """How often each parameter is read."""
        results = question.trace.nodes_of("result")
        self.activation = next((node.index for node in results if node.differentiable), None)

    def make(self, node: Node, given: list[set[Place]]) -> Iterator[Choice]:
        """The choices of `node` when its inputs can be had as `given`."""
        if node.kind == "input":
            assert isinstance(node.mark, Input)
            place = self.q.activation if node.mark.name == self.q.trace.call.activation else WHOLE
            return iter([Choice((), place)] if self._divides(node, place) else [])
        if node.kind == "constant":
            return iter([Choice((), WHOLE)])
        if node.kind == "result":
            return iter([Choice((self.q.activation if node.index == self.activation else WHOLE,), None)])
        if node.kind == "parameter":
            return self._parameter(node)
        return self._border(node, given[0]) if node.kind == "border" else self._operator(node, given)

    def _divides(self, node: Node, place: Place) -> bool:
        return not place.is_sharded or (place.dim < len(node.shape) and divides(node.shape, place, self.q.degree))

    # -- parameters

    def _parameter(self, node: Node) -> Iterator[Choice]:
        own = node.mark
        assert isinstance(own, OwnParameter)
        for use in dict.fromkeys(settled(place, node.differentiable) for place in self._uses(node, own)):
            stored = self.q.stored.get(own.identity, use if use.is_sharded else WHOLE)
            redistributes = use.chunks == 1 and can_change(stored, use) and (stored.is_sharded or not use.is_sharded)
            if stored == use or redistributes:
                yield self._stored(node, stored, use)

    def _uses(self, node: Node, own: OwnParameter) -> Iterator[Place]:
        """How a parameter may be used; one that nothing uses and no other read depends on stays whole."""
        yield WHOLE
        if node.index in self.used or self.reads[own.identity] > 1:
            yield USED
            if len(node.shape) == 1:
                yield PARTIAL
            shards = (shard(dim, n) for dim in range(len(node.shape)) for n in sorted(self.chunks))
            yield from (place for place in shards if self._divides(node, place))

    def _stored(self, node: Node, stored: Place, use: Place) -> Choice:
        rates = self.q.rates
        kept = node.num_bytes / (self.q.degree if stored.is_sharded else 1)
        seconds = kept * rates.state_bytes_per_byte / rates.link_bytes_per_second
        return Choice((), use, seconds + self._change_seconds(node, stored, use), use.chunks, stored)

    # -- borders

    def _border(self, node: Node, given: set[Place]) -> Iterator[Choice]:
        targets = [WHOLE, USED, *(shard(dim) for dim in range(len(node.shape)) if self._may_cut(node, dim))]
        rank = self._border_rank(node)
        for source in sorted(given):
            yield Choice((source,), source)
            for target in dict.fromkeys(settled(target, node.differentiable) for target in targets):
                if source != target and self._may_change(source, target):
                    yield Choice((source,), target, self._change_seconds(node, source, target), rank)

    def _may_change(self, source: Place, target: Place) -> bool:
        """Whether a border may do this. Going from one cut, or from a sum, to a cut is what sequence sharding adds."""
        to_cut = target.is_sharded and source != WHOLE
        return source.chunks == 1 and can_change(source, target) and not (to_cut and self.q.sequence == "none")

    def _may_cut(self, node: Node, dim: int) -> bool:
        """Whether a border may cut a value there.

        Samples are never divided, a sequence only if that was asked for, and the unit takes its activation as it comes.
        """
        rank, trace = len(node.shape), self.q.trace
        is_own = node.mark == Border(trace.name, "inputs", trace.call.activation or "")
        if node.shape[dim] % self.q.degree or (dim == 0 and rank > 1) or is_own:
            return False
        is_sequence = rank == 3 and dim == 1
        return not is_sequence or (self.q.sequence == "megatron" and node.differentiable)

    def _border_rank(self, node: Node) -> float:
        """Prefers outer modules, modules with parameters over the likes of dropout, and inputs over outputs."""
        border = node.mark
        assert isinstance(border, Border)
        relative = border.module.removeprefix(self.q.trace.name).removeprefix(".")
        module = self.q.trace.module.get_submodule(relative)
        empty = next(module.parameters(), None) is None
        return 1 + len(relative.split(".")) * (relative != "") + 0.5 * (border.side == "outputs") + 8 * empty

    def _change_seconds(self, node: Node, source: Place, target: Place) -> float:
        directions = (False, True) if node.differentiable else (False,)
        moved = sum(moved_share(source, target, self.q.degree, backward=backward) for backward in directions)
        return moved * node.num_bytes / self.q.rates.link_bytes_per_second

    # -- operators

    def _operator(self, node: Node, given: list[set[Place]]) -> Iterator[Choice]:
        factors = self.factors[node.index]
        grads = [self.q.trace.nodes[i].differentiable for i in node.inputs]
        for rule in rules(factors, given, grads, node.differentiable, self.q.degree):
            choice = Choice(rule.inputs, rule.output, self._work_seconds(node, factors, rule))
            if not (choice.is_sharded and node.index in self.q.whole):
                yield choice

    def _work_seconds(self, node: Node, factors: Factors, rule: Rule) -> float:
        """Forward, and twice as much backward where gradients flow."""
        if factors.is_view:
            return 0.0
        degree, rates = self.q.degree, self.q.rates
        tensors = [(self.q.trace.nodes[i], place) for i, place in zip(node.inputs, rule.inputs, strict=True)]
        moved = sum(x.num_bytes / (degree if place.is_sharded else 1) for x, place in (*tensors, (node, rule.output)))
        seconds = moved / rates.memory_bytes_per_second
        if factors.is_product:
            seconds += _flops(factors) / (degree if rule.is_cut else 1) / rates.flops_per_second
        return seconds * (3 if node.differentiable else 1)


def _flops(factors: Factors) -> float:
    flops = 2.0
    for size in factors.sizes:
        flops *= size
    return flops


def _chunk_counts(factors: Factors) -> Iterator[int]:
    """Into how many chunks the operator's dims fall where it takes a fast factor from behind a slower one."""
    for dims in (*factors.inputs, factors.output):
        for dim in dims:
            slower = 1
            for factor in dim:
                if slower > 1 and factor not in factors.fixed:
                    yield slower
                slower *= factors.sizes[factor]


def _prune(nodes: tuple[Node, ...], choices: list[list[Choice]]) -> None:
    """Removes, in place, choices for which some neighbour has no choice that fits, until all have."""
    takers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for node in nodes:
        for position, source in enumerate(node.inputs):
            takers[source].append((node.index, position))
    waiting = set(range(len(nodes)))
    while waiting:
        index = max(waiting)
        waiting.remove(index)
        fitting = [c for c in choices[index] if _fits(c, nodes[index], takers[index], choices)]
        if len(fitting) < len(choices[index]):
            choices[index] = fitting
            waiting.update(nodes[index].inputs, (taker for taker, _ in takers[index]))


def _fits(choice: Choice, node: Node, takers: list[tuple[int, int]], choices: list[list[Choice]]) -> bool:
    given = all(
        any(other.output == place for other in choices[source])
        for place, source in zip(choice.inputs, node.inputs, strict=True)
    )
    return given and all(any(other.inputs[i] == choice.output for other in choices[taker]) for taker, i in takers)
