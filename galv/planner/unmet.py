"""Demands that nothing meets: which ones, and what there is instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from galv.cost_models.strategies import strategy_of
from galv.cost_models.unit import FactsPricer
from galv.errors import UsageError
from galv.planner.constraints import PIPELINE_KEYS, Constraints, Demand
from galv.planner.kinds import pipeline_choice, unit_kind
from galv.planner.space import Candidate, exclusion, listed, recompute_levels, rows
from galv.planner.tables import Limits, has_choices

_Spaces = Sequence[tuple[FactsPricer, Sequence[Candidate]]]


def unmet(spaces: _Spaces, limits: Limits) -> UsageError:
    """The error for `limits` that leave nothing of `spaces`: one demand that nothing meets and the values that there
    are, or the fewest demands that contradict each other."""
    spaces = [(shared, _distinct(shared, found)) for shared, found in spaces]
    for demand in limits.constraints.demands:
        for subject, values in _values(spaces, demand):
            if not any(demand.allows(value) for value in values):
                return UsageError(f"{demand}: {demand.key}{subject} can be {_in_words(values)} here")
    conflict = _conflict(spaces, limits)
    if not conflict:
        return UsageError("no layout can exist for this model here")
    return UsageError(f"these cannot be met together here: {', '.join(map(str, conflict))}")


def _distinct(shared: FactsPricer, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that can exist."""
    reasons = {degrees: exclusion(shared, degrees) for degrees in {c.uniform for c in found} if degrees is not None}
    return [candidate for candidate in found if candidate.uniform is None or reasons[candidate.uniform] is None]


def _values(spaces: _Spaces, demand: Demand) -> Iterator[tuple[str, set[Any]]]:
    """(of which unit, its values of the demand's key) for all that the demand is about."""
    if demand.key in PIPELINE_KEYS:
        yield "", {getattr(pipeline_choice(candidate), demand.key) for _, found in spaces for candidate in found}
        return
    graph = spaces[0][0].graph
    governed = {unit.unit_class: unit.name for unit in graph.units if demand.governs(unit_kind(graph, unit))}
    for unit_class, name in governed.items():
        subject = "" if len(governed) == len(graph.classes) else f" of {name}"
        yield subject, {value for shared, found in spaces for value in _of_class(shared, found, unit_class, demand.key)}


def _of_class(shared: FactsPricer, found: Sequence[Candidate], unit_class: str, key: str) -> Iterator[Any]:
    if key == "recompute":
        yield from recompute_levels(shared.graph, unit_class)
        return
    plain = {replace(c, outer=replace(c.outer, schedule="none", virtual_stages=1)) for c in found}
    for candidate in plain:
        for row in rows(shared, candidate, unit_class):
            is_sample = key == "microbatch"
            yield candidate.outer.microbatch(row.sharing.dp) if is_sample else getattr(strategy_of(row, "none"), key)


def _in_words(values: Iterable[Any]) -> str:
    found = list(values)
    if all(isinstance(value, int) for value in found):
        return listed(found)
    return ", ".join(sorted(value if isinstance(value, str) else "+".join(value) or "none" for value in found))


def _conflict(spaces: _Spaces, limits: Limits) -> list[Demand]:
    """Demands that cannot be met together, though all but any one of them can."""
    kept = list(limits.constraints.demands)
    for demand in limits.constraints.demands:
        fewer = [one for one in kept if one is not demand]
        if not _exists(spaces, replace(limits, constraints=Constraints(tuple(fewer)))):
            kept = fewer
    return kept


def _exists(spaces: _Spaces, limits: Limits) -> bool:
    return any(
        limits.constraints.allow_pipeline(pipeline_choice(candidate)) and has_choices(shared, candidate, limits)
        for shared, found in spaces
        for candidate in found
    )
