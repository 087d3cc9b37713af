"""From a candidate to the search's numbers: the cost table, and the unit costs behind its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from galv.cost_models.memory import usable_bytes
from galv.cost_models.strategies import ClassCosts, Row, class_costs
from galv.cost_models.unit import Degrees, FactsPricer, UnitCost
from galv.planner.borders import border_of, border_seconds, send_seconds, sent_bytes, transitions
from galv.planner.constraints import Constraints
from galv.planner.kinds import Kinds
from galv.planner.plan import Recompute, Strategy
from galv.planner.search.table import CostTable, Option
from galv.planner.space import Candidate, recompute_levels, rows


@dataclass(frozen=True)
class Limits:
    """What units may choose from; None leaves the choice to the search."""

    zero: int | None = None
    recompute: Recompute | None = None
    constraints: Constraints = Constraints()  # noqa: RUF009  # frozen
    """The user's demands."""
    kept: frozenset[tuple[str, Strategy]] = frozenset()
    """Strategies of unit classes that stay options even where others are better in everything."""


@dataclass(frozen=True)
class PricedTable:
    """A cost table with what its options stand for."""

    candidate: Candidate
    table: CostTable
    """Its chain names the kind of each unit."""
    costs: Mapping[str, ClassCosts]
    """Of each kind."""
    pricer: FactsPricer

    def cost(self, kind: str, strategy: Strategy) -> UnitCost:
        """The cost behind the option of units of that kind with that strategy."""
        return self.costs[kind].cost(*self._places[kind, strategy])

    @cached_property
    def _places(self) -> dict[tuple[str, Strategy], tuple[int, int]]:
        return {
            (name, costs.strategy(i, j)): (i, j)
            for name, costs in self.costs.items()
            for i in range(len(costs.rows))
            for j in range(len(costs.recomputes))
        }


def priced_tables(
    shared: FactsPricer,
    candidate: Candidate,
    budget_bytes: int,
    limits: Limits = Limits(),  # frozen
) -> Iterator[PricedTable]:
    """The tables of `candidate`: one, or one for each way that tied units can share their tensor; none where some unit
    class has no strategy.

    Where DistributedDataParallel could run the plan there is a table for that before. Tied units share one tensor. On
    one stage it has one owner; on two, each stage holds a copy and they exchange gradients shard by shard, so both must
    be cut alike.
    """
    outer = candidate.outer
    for choices in _choices(shared, candidate, limits):
        options = choices.options
        if outer.pp > 1 and _last_runs_alone(shared, candidate):
            last = choices.chain[-1]
            options = {**options, last: tuple(map(_held_while_it_runs, options[last]))}
        table = CostTable(
            chain=choices.chain,
            options=options,
            num_stages=outer.pp,
            num_microbatches=outer.num_microbatches,
            schedule=outer.schedule,
            transfer_seconds=choices.send_seconds,
            usable_bytes=usable_bytes(budget_bytes, shared.cluster.device),
            virtual_stages=outer.virtual_stages,
            transitions=choices.transitions,
        )
        yield PricedTable(candidate, table, choices.costs, shared)


def _last_runs_alone(shared: FactsPricer, candidate: Candidate) -> bool:
    """Whether the model's last unit runs its backward right after its forward, whatever the cut: then what it keeps is
    never there beside the working bytes of another unit."""
    outer, graph = candidate.outer, shared.graph
    alone = graph.counts[graph.units[-1].unit_class] == 1 and len(graph.units) > 1
    in_turn = outer.schedule == "none" or (outer.schedule == "1f1b" and outer.num_microbatches >= outer.pp)
    return alone and in_turn


def _held_while_it_runs(option: Option) -> Option:
    return replace(option, activation_bytes=0.0, working_bytes=option.working_bytes + option.activation_bytes)


# ----------------------------------------------------------------------------------------------- choices


@dataclass(frozen=True)
class _Choices:
    """What a table of a candidate has whatever its schedule."""

    chain: tuple[str, ...]
    costs: Mapping[str, ClassCosts]
    options: Mapping[str, tuple[Option, ...]]
    send_seconds: float
    transitions: Mapping[tuple[int, int], tuple[float, float]]


_KNOWN: WeakKeyDictionary[FactsPricer, dict[tuple[Candidate, Limits], tuple[_Choices, ...]]] = WeakKeyDictionary()


def _choices(shared: FactsPricer, candidate: Candidate, limits: Limits) -> tuple[_Choices, ...]:
    """The choices behind the tables of `candidate`, found once for all schedules."""
    known = _KNOWN.setdefault(shared, {})
    plain = replace(candidate, outer=replace(candidate.outer, schedule="none", virtual_stages=1))
    if (plain, limits) not in known:
        known[plain, limits] = tuple(_found(shared, plain, limits))
    return known[plain, limits]


def has_choices(shared: FactsPricer, candidate: Candidate, limits: Limits) -> bool:
    """Whether `candidate` leaves every unit a strategy, priced or not."""
    return next(_chosen(shared, candidate, Kinds.of(shared.graph, limits.constraints), limits), None) is not None


def _found(shared: FactsPricer, candidate: Candidate, limits: Limits) -> Iterator[_Choices]:
    kinds = Kinds.of(shared.graph, limits.constraints)
    for chosen, ddp in _chosen(shared, candidate, kinds, limits):
        yield _priced(shared, candidate, kinds, chosen, limits, ddp)


def _chosen(
    shared: FactsPricer, candidate: Candidate, kinds: Kinds, limits: Limits
) -> Iterator[tuple[dict[str, list[Row]], bool]]:
    """(the rows of every kind, whether DistributedDataParallel runs the plan) of each table."""
    of_class = {name: _limited(rows(shared, candidate, name), limits.zero) for name in shared.graph.classes}
    all_rows = {kind: kinds.allowed_rows(kind, candidate, of_class[name]) for kind, name in kinds.classes.items()}
    for keep, ddp in _variants(candidate, kinds.of_classes(shared.tied_classes), all_rows):
        chosen = {kind: [row for row in found if keep(kind, row)] for kind, found in all_rows.items()}
        if all(chosen.values()) and all(_recomputes(shared, kinds, kind, limits) for kind in chosen):
            yield chosen, ddp


def _recomputes(shared: FactsPricer, kinds: Kinds, kind: str, limits: Limits) -> tuple[Recompute, ...]:
    """What units of a kind may recompute."""
    possible = recompute_levels(shared.graph, kinds.classes[kind])
    wanted = tuple(level for level in possible if limits.recompute in (None, level)) or ("none",)
    return kinds.allowed_recomputes(kind, wanted)


def _limited(found: Sequence[Row], zero: int | None) -> list[Row]:
    """The rows of that ZeRO level; those of level 0 where there is nothing to share."""
    return [
        row
        for row in found
        if zero is None or row.sharing.zero == zero or (row.sharing.zero == 0 and row.sharing.dp * row.degrees.cp == 1)
    ]


Keep = Callable[[str, Row], bool]


def _variants(
    candidate: Candidate, tied: frozenset[str], all_rows: Mapping[str, Sequence[Row]]
) -> Iterator[tuple[Keep, bool]]:
    """(which rows of which kind to keep, whether DistributedDataParallel runs the plan) for each table, given the kinds
    of units that share tensors."""
    if _may_be_ddp(candidate):
        yield lambda _, row: row.degrees == Degrees() and row.sharing.zero == 0 and not row.offload, True
    if not tied:
        yield lambda _, row: True, False
    for way in dict.fromkeys(_way(row) for name in sorted(tied) for row in all_rows[name]):
        yield _keeps(tied, way), False


def _keeps(tied: frozenset[str], way: tuple[int, int, int, bool]) -> Keep:
    return lambda name, row: name not in tied or _way(row) == way


def _way(row: Row) -> tuple[int, int, int, bool]:
    """How a unit cuts what it may share with others, and where that lies."""
    return row.degrees.tp, row.sharing.dp_shard, row.sharing.zero, "parameters" in row.offload


def _may_be_ddp(candidate: Candidate) -> bool:
    """Whether DistributedDataParallel runs the plan, were every unit at ZeRO 0 without a tensor axis."""
    whole = candidate.uniform is None or candidate.uniform.num_ranks == 1
    return whole and candidate.outer.pp == 1 and candidate.outer.precision == "fp32" and candidate.num_devices > 1


def _priced(
    shared: FactsPricer,
    candidate: Candidate,
    kinds: Kinds,
    chosen: Mapping[str, Sequence[Row]],
    limits: Limits,
    ddp: bool,
) -> _Choices:
    borders, costs = {}, {}
    for kind, found in chosen.items():
        name, levels = kinds.classes[kind], _recomputes(shared, kinds, kind, limits)
        borders[kind] = [border_of(shared, name, row.degrees) for row in found]
        costs[kind] = _costs(shared, candidate, name, found, levels, ddp)
    ids = {border: i for i, border in enumerate(dict.fromkeys(b for found in borders.values() for b in found))}
    if candidate.uniform is not None:
        ids = dict.fromkeys(ids, 0)
    options: dict[str, tuple[Option, ...]] = {}
    largest: dict[str, float] = {}
    for kind, priced in costs.items():
        layouts = [ids[border] for border in borders[kind]]
        name = kinds.classes[kind]
        places = _best(shared, candidate, name, priced, layouts, limits)
        options[kind] = tuple(_options(priced, places, layouts))
        largest[name] = max(largest.get(name, 0.0), *(priced.priced[i].facts.output_bytes for i, _ in places))
    return _Choices(
        chain=kinds.chain,
        costs=costs,
        options=options,
        send_seconds=send_seconds(shared, candidate, sent_bytes(shared.graph, largest)),
        transitions=transitions(shared, candidate, ids) if candidate.uniform is None else {},
    )


def _costs(
    shared: FactsPricer,
    candidate: Candidate,
    unit_class: str,
    found: Sequence[Row],
    levels: Sequence[Recompute],
    ddp: bool,
) -> ClassCosts:
    graph, outer = shared.graph, candidate.outer
    copy = outer.pp == 1 and unit_class in shared.tied_classes and graph.units[0].unit_class != unit_class
    costs = class_costs(shared, unit_class, outer, found, levels, tied_copy=copy, ddp=ddp)
    if candidate.uniform is None:
        return costs
    # What stands around the blocks pays for both of its borders.
    degrees = dict.fromkeys(graph.classes, candidate.uniform)
    paid = {
        own: border_seconds(shared, outer, candidate.num_devices, unit_class, {**degrees, unit_class: own})
        for own in dict.fromkeys(row.degrees for row in found)
    }
    forward, backward = np.array([paid[row.degrees] for row in found]).T
    return costs.with_exposed(forward[:, None], backward[:, None])


# ----------------------------------------------------------------------------------------------- options


def _options(costs: ClassCosts, places: Sequence[tuple[int, int]], layouts: Sequence[int]) -> Iterator[Option]:
    """The options at `places`, each of the layout of its row."""
    taken = tuple(np.array(places).T)
    columns = {name: values[taken].tolist() for name, values in costs.figures.items()}
    names, rows_of_figures = list(columns), zip(*columns.values(), strict=True)
    for (i, j), figures in zip(places, rows_of_figures, strict=True):
        at = dict(zip(names, figures, strict=True))
        yield Option(
            strategy=costs.strategy(i, j),
            forward_seconds=at["forward_compute"] + at["forward_exposed"],
            backward_seconds=at["backward_compute"] + at["backward_exposed"],
            step_seconds=at["step_exposed"] + at["update"],
            state_bytes=at["state_bytes"],
            activation_bytes=at["activation_bytes"],
            working_bytes=at["working_bytes"],
            layout=layouts[i],
            weight_seconds=at["weight"],
        )


def _best(
    shared: FactsPricer,
    candidate: Candidate,
    unit_class: str,
    costs: ClassCosts,
    layouts: Sequence[int],
    limits: Limits,
) -> list[tuple[int, int]]:
    """(row, recompute) of the strategies that no other of the same layout beats or equals in every number."""
    numbers = _numbers(shared, candidate, unit_class, costs)
    by_layout = np.repeat(np.array(layouts), len(costs.recomputes))
    found = []
    for layout in dict.fromkeys(layouts):
        places = np.flatnonzero(by_layout == layout)
        found += places[undominated(numbers[places])].tolist()
    if limits.kept:
        found += [
            place
            for place in range(by_layout.size)
            if (unit_class, costs.strategy(*divmod(place, len(costs.recomputes)))) in limits.kept
        ]
    return [divmod(place, len(costs.recomputes)) for place in sorted(set(found))]


def _numbers(shared: FactsPricer, candidate: Candidate, unit_class: str, costs: ClassCosts) -> np.ndarray:
    """(strategies, numbers), of which fewer are better; on a single stage their sums are all that counts."""
    at, rounds = costs.figures, candidate.outer.num_microbatches
    forward = at["forward_compute"] + at["forward_exposed"]
    backward = at["backward_compute"] + at["backward_exposed"]
    step, states, kept, working = (
        at["step_exposed"] + at["update"],
        at["state_bytes"],
        at["activation_bytes"],
        at["working_bytes"],
    )
    if candidate.outer.pp > 1:
        columns = [forward, backward, step, states, kept, working]
        # What can run later is worth something to schedules that split backward.
        columns += [-at["weight"]] if candidate.features.zero_bubble else []
    else:
        last = unit_class == shared.graph.units[-1].unit_class and _last_runs_alone(shared, candidate)
        held = [states, kept + working] if last else [states + kept, working]
        columns = [rounds * (forward + backward) + step, *held]
    return np.stack([column.ravel() for column in columns], axis=1)


def undominated(numbers: np.ndarray) -> np.ndarray:
    """The rows of `numbers` that no other row undercuts or equals in every column; of equal rows the first."""
    no_more = np.ones((len(numbers), len(numbers)), dtype=bool)
    for column in numbers.T:
        no_more &= column[:, None] <= column[None, :]
    equal = no_more & no_more.T
    beats = (no_more & ~equal) | np.triu(equal, 1)
    return np.flatnonzero(~beats.any(axis=0))
