"""From a candidate to the search's numbers: the cost table, and the unit costs behind its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from galv.cost_models.memory import usable_bytes
from galv.cost_models.unit import FactsPricer, UnitCost, UnitPricer
from galv.planner.graph import ModelGraph
from galv.planner.plan import Recompute, Strategy
from galv.planner.search.table import CostTable, Option
from galv.planner.space import Candidate, recompute_levels, zero_levels


@dataclass(frozen=True)
class Limits:
    """The levels that units may choose from; None leaves the choice to the search."""

    zero: int | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True)
class PricedTable:
    """A cost table with what its options stand for."""

    candidate: Candidate
    table: CostTable
    costs: Mapping[tuple[str, Strategy], UnitCost]
    pricer: UnitPricer


def priced_tables(
    shared: FactsPricer,
    candidate: Candidate,
    budget_bytes: int,
    limits: Limits = Limits(),  # frozen
) -> Iterator[PricedTable]:
    """The tables of `candidate`: one, or one for each ZeRO level of tied units, which must agree on it.

    Where DistributedDataParallel could run the plan there is a table for that before.

    Tied units share one tensor. On one stage it has one owner; on two, each stage holds a copy and they exchange
    gradients shard by shard, so both must be sharded alike.
    """
    pricer = UnitPricer(shared, candidate.setting)
    levels = [z for z in zero_levels(candidate.setting.dp) if limits.zero in (None, z)] or [0]
    tied = _tied_classes(shared.graph)
    if 0 in levels and candidate.setting.is_ddp_possible:
        yield _table(pricer, candidate, budget_bytes, _Levels({}, [0], limits.recompute, ddp=True))
    for level in levels if tied else (None,):
        own = {} if level is None else {name: [level] for name in tied}
        yield _table(pricer, candidate, budget_bytes, _Levels(own, levels, limits.recompute))


@dataclass(frozen=True)
class _Levels:
    """What the units of one table may choose from."""

    own: Mapping[str, list[int]]
    """ZeRO levels of classes that are limited to some."""
    zero: list[int]
    """ZeRO levels of the others."""
    recompute: Recompute | None
    ddp: bool = False


def _tied_classes(graph: ModelGraph) -> frozenset[str]:
    return frozenset(graph.units[i].unit_class for group in graph.tied_units for i in group)


def _table(pricer: UnitPricer, candidate: Candidate, budget_bytes: int, levels: _Levels) -> PricedTable:
    graph, setting = pricer.graph, candidate.setting
    costs = {(name, cost.strategy): cost for name in graph.classes for cost in _costs(pricer, name, levels)}
    options = {
        name: tuple(_undominated([_option(c) for (owner, _), c in costs.items() if owner == name]))
        for name in graph.classes
    }
    table = CostTable(
        chain=tuple(unit.unit_class for unit in graph.units),
        options=options,
        num_stages=setting.pp,
        num_microbatches=setting.num_microbatches,
        schedule=candidate.schedule,
        transfer_seconds=pricer.transfer_seconds(),
        usable_bytes=usable_bytes(budget_bytes, pricer.cluster.device),
    )
    return PricedTable(candidate, table, costs, pricer)


def _costs(pricer: UnitPricer, unit_class: str, levels: _Levels) -> Iterator[UnitCost]:
    graph = pricer.graph
    possible = recompute_levels(graph, unit_class)
    wanted = [r for r in possible if levels.recompute in (None, r)] or ["none"]
    copy = pricer.setting.pp == 1 and unit_class in _tied_classes(graph) and graph.units[0].unit_class != unit_class
    for zero in levels.own.get(unit_class, levels.zero):
        for level in wanted:
            yield pricer.price(unit_class, zero, level, tied_copy=copy, ddp=levels.ddp)


def _option(cost: UnitCost) -> Option:
    return Option(
        strategy=cost.strategy,
        forward_seconds=cost.forward_compute_seconds + cost.forward_exposed_seconds,
        backward_seconds=cost.backward_compute_seconds + cost.backward_exposed_seconds,
        step_seconds=cost.step_exposed_seconds + cost.optimizer_seconds,
        state_bytes=cost.states.total_bytes,
        activation_bytes=cost.activation_bytes,
        working_bytes=cost.working_bytes,
        weight_seconds=cost.weight_seconds,
    )


def _undominated(options: list[Option]) -> Iterator[Option]:
    """The options that no other beats or equals in every number; of equals the first."""
    numbers = [_numbers(option) for option in options]
    for i, mine in enumerate(numbers):
        beaten = any(
            all(x <= y for x, y in zip(other, mine, strict=True)) and (other != mine or j < i)
            for j, other in enumerate(numbers)
            if j != i
        )
        if not beaten:
            yield options[i]


def _numbers(option: Option) -> tuple[float, ...]:
    return (
        option.forward_seconds,
        option.backward_seconds,
        option.step_seconds,
        option.state_bytes,
        option.activation_bytes,
        option.working_bytes,
    )
