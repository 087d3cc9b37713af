"""The tensor-parallel layout of one unit: solve, rehearse, write down.

A repeated block is solved as one trace, its activation entering and leaving as the sequence mode says. The modules of
embedding and head are solved one by one, whole at their borders. Parameters that another unit holds as well are stored
by one rule that looks at nothing but shape and degree, so that all of these units store them alike: cut along the first
dim (the vocabulary of a table) if the degree divides it, else whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from galv.errors import ModelError
from galv.planner.capture.sample import UnitSample
from galv.planner.graph import Exclusion
from galv.planner.plan import LocalArgument, ModuleLayout, Redistribution, SequenceMode, TensorParallelLayout
from galv.planner.sharding.choices import Choice, Question, Rates, choices_of, factors_in
from galv.planner.sharding.ilp import solve
from galv.planner.sharding.place import WHOLE, Place, redistribution, shard
from galv.planner.sharding.rehearse import Misfit, local_arguments
from galv.planner.sharding.trace import Border, OwnParameter, Trace, trace_call
from galv.planner.sharding.watch import paths


@dataclass(frozen=True)
class _Solved:
    """One trace with its answer."""

    modules: tuple[ModuleLayout, ...]
    arguments: tuple[LocalArgument, ...]
    is_sharded: bool
    """Whether any parameter is."""


def find_layout(
    unit: UnitSample, degree: int, sequence: SequenceMode, rates: Rates | None = None
) -> TensorParallelLayout | Exclusion:
    """The cheapest placements of `unit` on a tensor axis of `degree` ranks, or why it cannot be divided.

    Found on the graph of its calls, without knowing any module by name. A repeated block none of whose parameters can
    be divided is excluded; embedding and head then stay whole. The layout has been run on the meta device.
    """
    stored = _stored_elsewhere(unit, degree)
    parts: list[_Solved] = []
    try:
        for trace in traces_of(unit):
            is_block = unit.repeated and len(unit.calls) == 1
            question = Question(trace, degree, sequence if is_block else "none", rates or Rates(), stored)
            reason = _hindrance(question)
            solved = reason or _solved(question)
            if isinstance(solved, str):
                return Exclusion(solved)
            parts.append(solved)
            if is_block and not solved.is_sharded:
                return Exclusion(_nothing_divides(question))
    except ModelError as error:
        return Exclusion(str(error))
    return TensorParallelLayout(
        unit_class=unit.unit_class,
        degree=degree,
        sequence=sequence,
        modules=(*(module for part in parts for module in part.modules), *_uncalled(unit, stored)),
        local_arguments=tuple(argument for part in parts for argument in part.arguments),
    )


_TRACES: WeakKeyDictionary[UnitSample, list[Trace]] = WeakKeyDictionary()


def traces_of(unit: UnitSample) -> list[Trace]:
    """The graph of each call of the unit, made once for all degrees."""
    if unit not in _TRACES:
        _TRACES[unit] = [trace_call(call, unit.module(call.module)) for call in unit.calls]
    return _TRACES[unit]


def _stored_elsewhere(unit: UnitSample, degree: int) -> dict[int, Place]:
    """By identity: how parameters are stored that this unit shares, with another one or among its own modules."""
    seen: dict[int, set[int]] = {}
    places: dict[int, Place] = {}
    for position, (_, module) in enumerate(unit.modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owners = seen.setdefault(id(parameter), set())
            owners.add(position)
            path = name if len(unit.modules) == 1 else f"{position}.{name}"
            if len(owners) > 1 or path in unit.tied:
                divides = parameter.dim() > 0 and parameter.shape[0] % degree == 0
                places[id(parameter)] = shard(0) if divides else WHOLE
    return places


def _uncalled(unit: UnitSample, stored: Mapping[int, Place]) -> Iterator[ModuleLayout]:
    """Modules of the unit that no recorded call runs: their parameters are stored, but never used."""
    called = {call.module for call in unit.calls}
    for position, (_, root) in enumerate(unit.modules):
        name = str(position) if len(unit.modules) > 1 else ""
        if name in called:
            continue
        for path, module in paths(name, root):
            kept = {n: stored.get(id(p), WHOLE) for n, p in module.named_parameters(recurse=False)}
            if kept:
                parameters = {n: redistribution(place, place) for n, place in kept.items()}
                yield ModuleLayout(module=path, parameters=parameters)


# ----------------------------------------------------------------------------------------------- one trace


def _solved(question: Question) -> _Solved | str:
    """The answer, or why there is none. What a rehearsal refuses is kept whole in the next attempt."""
    whole: frozenset[int] = frozenset()
    while True:
        asked = Question(question.trace, question.degree, question.sequence, question.rates, question.stored, whole)
        chosen = solve(question.trace.nodes, choices_of(asked))
        if chosen is None:
            return _nothing_divides(question)
        modules = tuple(_modules(question.trace, chosen))
        arguments = local_arguments(question.trace, chosen, modules, question.degree, question.sequence)
        if not isinstance(arguments, Misfit):
            return _Solved(modules, arguments, any(c.stored and c.stored.is_sharded for c in chosen))
        blamed = {i for i in arguments.call.results if chosen[i].is_sharded}
        if not blamed:
            site = arguments.call.site
            return f"a shard cannot run {site.function} in {site.module or 'the block'}: {arguments.reason}"
        whole |= blamed


def _hindrance(question: Question) -> str | None:
    """What keeps the question from being asked at all."""
    trace, degree = question.trace, question.degree
    if trace.hazards:
        return f"{type(trace.module).__name__}: {trace.hazards[0]}"
    if question.sequence == "none" or trace.call.activation is None:
        return None
    shape = tuple(trace.call.tensor().shape)
    if len(shape) != 3:
        return f"sequence sharding needs an activation of (batch, sequence, width), but this one is {shape}"
    if shape[1] % degree:
        return f"the sequence of {shape[1]} cannot be divided by the tensor-parallel degree {degree}"
    return None


def _modules(trace: Trace, chosen: Sequence[Choice]) -> Iterator[ModuleLayout]:
    """What the runtime has to do for each module: every parameter, and the borders where something changes."""
    parameters: dict[str, dict[str, Redistribution]] = {}
    borders: dict[tuple[str, str], dict[str, Redistribution]] = {}
    for node, choice in zip(trace.nodes, chosen, strict=True):
        if isinstance(node.mark, OwnParameter):
            assert choice.stored and choice.output
            change = redistribution(choice.stored, choice.output)
            parameters.setdefault(node.mark.module, {})[node.mark.name] = change
        elif isinstance(node.mark, Border) and choice.change:
            borders.setdefault((node.mark.module, node.mark.side), {})[node.mark.name] = redistribution(*choice.change)
    for path, _ in paths(trace.name, trace.module):
        own, inputs, outputs = parameters.get(path), borders.get((path, "inputs")), borders.get((path, "outputs"))
        if own or inputs or outputs:
            yield ModuleLayout(module=path, parameters=own or {}, inputs=inputs or {}, outputs=outputs or {})


# ----------------------------------------------------------------------------------------------- why not


def _nothing_divides(question: Question) -> str:
    """The sizes that the degree would have to divide."""
    sizes: dict[int, str] = {}
    for size, where in _indivisible_sizes(question.trace, question.degree):
        sizes.setdefault(size, where)
    listed = "; ".join(f"{size} {where}" for size, where in sorted(sizes.items()))
    name = type(question.trace.module).__name__
    return f"tensor-parallel degree {question.degree} divides no parameter of {name}" + (listed and f": not {listed}")


def _indivisible_sizes(trace: Trace, degree: int) -> Iterator[tuple[int, str]]:
    """Sizes that `degree` does not divide, in weights and in the parts into which views take a dim apart."""
    for node in trace.nodes_of("parameter"):
        assert isinstance(node.mark, OwnParameter)
        if len(node.shape) > 1:
            yield from ((size, f"(in {node.mark.path} of {node.shape})") for size in node.shape if size % degree)
    factors = factors_in(trace)
    for call in trace.calls:
        for i in call.results if call.site.function in ("view", "reshape", "unflatten") else ():
            for dim in (*factors[i].output, *(dim for dims in factors[i].inputs for dim in dims)):
                parts = [factors[i].sizes[factor] for factor in dim]
                if len(parts) > 1 and parts[0] % degree:
                    where = f"{call.site.function} of {call.site.module or 'the block'}"
                    yield parts[0], f"(of {' x '.join(map(str, parts))}, {where})"
