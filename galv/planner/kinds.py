"""Kinds of units: units of one kind are of one class and under the same demands, so any two can change places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from galv.cost_models.strategies import Row, strategy_of
from galv.planner.constraints import Constraints, Demand, PipelineChoice, UnitKind, strategy_obstacle
from galv.planner.graph import ModelGraph, UnitRef
from galv.planner.plan import Recompute
from galv.planner.space import Candidate, is_block, recompute_levels


@dataclass(frozen=True)
class Kinds:
    """The kinds of a model's units; a kind is named like its class, with a number where the class has several."""

    chain: tuple[str, ...]
    """The kind of each unit, in the order of the model."""
    classes: Mapping[str, str]
    """The class of each kind."""
    demands: Mapping[str, tuple[Demand, ...]]
    """What is demanded of each kind."""

    @classmethod
    def of(cls, graph: ModelGraph, constraints: Constraints) -> Kinds:
        """The kinds of `graph` under `constraints`."""
        names: dict[tuple[str, tuple[Demand, ...]], str] = {}
        chain = []
        for unit in graph.units:
            key = unit.unit_class, constraints.of_unit(unit_kind(graph, unit)) if constraints.demands else ()
            others = sum(unit.unit_class == known for known, _ in names)
            names.setdefault(key, f"{unit.unit_class}#{others}" if others else unit.unit_class)
            chain.append(names[key])
        classes, demands = ({name: key[i] for key, name in names.items()} for i in (0, 1))
        return cls(tuple(chain), classes, demands)  # type: ignore[arg-type]  # halves of the keys

    def of_classes(self, classes: Iterable[str]) -> frozenset[str]:
        """The kinds of these classes."""
        wanted = frozenset(classes)
        return frozenset(kind for kind, unit_class in self.classes.items() if unit_class in wanted)

    def allowed_rows(self, kind: str, candidate: Candidate, found: Sequence[Row]) -> list[Row]:
        """The rows of `found` that the demands on `kind` allow, whatever they say of recomputation."""
        demands = [demand for demand in self.demands[kind] if demand.key != "recompute"]
        return [row for row in found if not demands or _obstacle(demands, candidate, row) is None]

    def allowed_recomputes(self, kind: str, found: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """The levels of `found` that the demands on `kind` allow."""
        demands = [demand for demand in self.demands[kind] if demand.key == "recompute"]
        return tuple(level for level in found if all(demand.allows(level) for demand in demands))


def _obstacle(demands: Sequence[Demand], candidate: Candidate, row: Row) -> Demand | None:
    microbatch = candidate.outer.microbatch(row.sharing.dp)
    assert microbatch is not None, "a row that exists has whole samples"
    return strategy_obstacle(demands, strategy_of(row, "none"), microbatch)


def unit_kind(graph: ModelGraph, unit: UnitRef) -> UnitKind:
    """What demands need to know of `unit`."""
    return UnitKind(
        name=unit.name,
        is_block=is_block(graph, unit.unit_class),
        can_recompute=len(recompute_levels(graph, unit.unit_class)) > 1,
        has_experts=graph.classes[unit.unit_class].experts > 0,
    )


def pipeline_choice(candidate: Candidate) -> PipelineChoice:
    """What demands need to know of an outer choice."""
    outer = candidate.outer
    return PipelineChoice(outer.pp, outer.schedule, outer.virtual_stages, outer.num_microbatches)
