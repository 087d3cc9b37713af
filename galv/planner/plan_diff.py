"""What differs between two plans: set-up, strategies, and where the seconds and bytes go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from galv.planner.plan import MemoryBreakdown, Plan
from galv.planner.plan_table import gib, seconds, table, unit_names

_SETUP: dict[str, Callable[[Plan], str | int | None]] = {
    "model": lambda plan: plan.model.name,
    "cluster": lambda plan: plan.cluster.spec,
    "memory budget GiB": lambda plan: gib(plan.cluster.memory_budget_bytes),
    "sequence": lambda plan: plan.training.seq_len,
    "global batch": lambda plan: plan.training.global_batch,
    "precision": lambda plan: plan.training.precision,
    "optimizer": lambda plan: plan.training.optimizer,
    "software": lambda plan: plan.training.stack,
    "pipeline degree": lambda plan: plan.pipeline.degree,
    "schedule": lambda plan: plan.pipeline.schedule,
    "virtual stages": lambda plan: plan.pipeline.virtual_stages,
    "microbatches": lambda plan: plan.training.num_microbatches,
    "microbatch": lambda plan: plan.micro_batch,
}
_SECONDS: dict[str, Callable[[Plan], float]] = {
    "step": lambda plan: plan.estimate.step_seconds,
    "compute": lambda plan: plan.estimate.breakdown.compute_seconds,
    "exposed communication": lambda plan: plan.estimate.breakdown.communication_seconds,
    "bubble": lambda plan: plan.estimate.breakdown.bubble_seconds,
    "optimizer": lambda plan: plan.estimate.breakdown.optimizer_seconds,
}


@dataclass(frozen=True)
class Difference:
    """One thing that plans A and B say differently; None where one of them does not have it."""

    name: str
    a: str | int | None
    b: str | int | None


@dataclass(frozen=True)
class Change:
    """One figure that differs between plans A and B."""

    name: str
    a: float
    b: float


@dataclass(frozen=True)
class PlanDiff:
    """What differs between plans A and B. `str` is a table for people."""

    setup: tuple[Difference, ...]
    strategies: tuple[Difference, ...]
    """For each run of units the stage and strategy."""
    seconds: tuple[Change, ...]
    """Of one step; parts are the mean over devices."""
    peak_bytes: tuple[Change, ...]
    """Of the fullest device, and its parts."""

    def __str__(self) -> str:
        parts = [_words("set-up", self.setup), _words("units", self.strategies)]
        costs = [(row, seconds) for row in self.seconds] + [(row, gib) for row in self.peak_bytes]
        if costs:
            rows = [(row.name, show(row.a), show(row.b), _change(row.a, row.b)) for row, show in costs]
            parts.append(table([("estimate", "A", "B", "B against A"), *rows], right=(1, 2)))
        return "\n\n".join(part for part in parts if part) or "the plans are equal in all that they do"


def differences(a: Plan, b: Plan) -> PlanDiff:
    """What differs between `a` and `b`: what they do and what it is estimated to cost, not how they were found."""
    here, there = (max((s.memory for s in plan.estimate.stages), key=lambda m: m.total_bytes) for plan in (a, b))
    return PlanDiff(
        setup=tuple(Difference(name, of(a), of(b)) for name, of in _SETUP.items() if of(a) != of(b)),
        strategies=tuple(run for run in _runs(_placed(a), _placed(b)) if run.a != run.b),
        seconds=tuple(Change(name, of(a), of(b)) for name, of in _SECONDS.items() if of(a) != of(b)),
        peak_bytes=tuple(peak for peak in _peaks(here, there) if peak.a != peak.b),
    )


def _placed(plan: Plan) -> dict[str, str]:
    """Strategy of every unit, and its stage where there are several."""
    several = len(plan.stages) > 1
    return {
        unit.name: (f"stage {index}: " if several else "") + str(unit.strategy)
        for index, stage in enumerate(plan.stages)
        for unit in stage.units
    }


def _runs(a: dict[str, str], b: dict[str, str]) -> Iterator[Difference]:
    """Runs of neighbouring units that have one place in `a`, and one in `b`."""
    names = [*a, *(name for name in b if name not in a)]
    for places, run in groupby(names, key=lambda name: (a.get(name), b.get(name))):
        yield Difference(unit_names(list(run)), *places)


def _peaks(a: MemoryBreakdown, b: MemoryBreakdown) -> Iterator[Change]:
    for field in MemoryBreakdown.model_fields:
        yield Change(f"peak GiB: {field.removesuffix('_bytes')}", getattr(a, field), getattr(b, field))
    yield Change("peak GiB", a.total_bytes, b.total_bytes)


def _words(title: str, rows: tuple[Difference, ...]) -> str:
    shown = [(row.name, *("-" if value is None else str(value) for value in (row.a, row.b))) for row in rows]
    return table([(title, "A", "B"), *shown]) if rows else ""


def _change(before: float, after: float) -> str:
    if not before:
        return "new"
    ratio = after / before
    return f"{ratio:.1f} times" if ratio >= 2 else f"{100 * (ratio - 1):+.1f} %"
