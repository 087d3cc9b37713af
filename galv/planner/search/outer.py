"""The outer problem: which of many tables has the best plan. Best-first branch and bound, a pure function of the
tables.

Tables are looked at in the order of a cheap bound, each with the best plan so far as the one to beat, until no bound
left is below it. What is minimized is a table's weight times the step: weights of 1 give the most throughput,
numbers of devices the least cost of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galv.planner.search.memory import least_usable_bytes
from galv.planner.search.solution import Clock, Solution
from galv.planner.search.solve import lower_bound_seconds, solve
from galv.planner.search.table import CostTable

Watch = Callable[[int, int, "Ranked | None"], None]
"""Told how many of how many tables are done, and of a better plan."""

BY_BOUND = "a bound of the whole layout is no better than the plan found"
BY_CUTS = "no cut and no choice of strategies beats the plan found"
BY_MEMORY = "does not fit"
BY_TIME = "time was up"


@dataclass(frozen=True)
class Ranked:
    """The best plan of one table."""

    table: int
    """Its place among the tables."""
    solution: Solution


@dataclass(frozen=True)
class Outcome:
    """What was found."""

    best: tuple[Ranked, ...]
    """The best plans, at most one a table, best first."""
    gap: float
    """At most this share of the best plan's weighted step could still be saved; 0 when it is proven optimal."""
    priced: int
    """Tables in all."""
    pruned: tuple[tuple[str, int], ...]
    """Why tables did not give a plan, and how many."""
    is_time_limited: bool


def best_plans(
    tables: Sequence[CostTable],
    number: int = 1,
    *,
    weights: Sequence[float] | None = None,
    tolerance: float = 0.0,
    clock: Clock | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """The `number` best plans of different tables; `tolerance` is the gap that is good enough to stop at.

    With one plan wanted the gap is a proof over all tables; with several, it holds for the best of them.
    """
    return _Search(tables, number, weights or [1.0] * len(tables), tolerance, clock or Clock(), watch).run()


@dataclass(eq=False)
class _Search:
    """One run."""

    tables: Sequence[CostTable]
    number: int
    weights: Sequence[float]
    tolerance: float
    clock: Clock
    watch: Watch | None

    def run(self) -> Outcome:
        bounds = [weight * lower_bound_seconds(table) for weight, table in zip(self.weights, self.tables, strict=True)]
        order = sorted(range(len(bounds)), key=lambda i: bounds[i])
        best: list[Ranked] = []
        pruned: dict[str, int] = {}
        open_bound = np.inf
        for done, place in enumerate(order):
            reason = self._reason_to_stop(bounds[place], best)
            if reason is not None:
                pruned[reason] = len(order) - done
                open_bound = min(open_bound, bounds[place])
                break
            self._tell(done, None)
            goal = self._goal(best) / self.weights[place]
            found = solve(self.tables[place], incumbent_seconds=goal, tolerance=self.tolerance, clock=self.clock)
            if found is None or found.solution is None:
                reason = BY_CUTS if np.isfinite(goal) and np.isfinite(bounds[place]) else BY_MEMORY
                pruned[reason] = pruned.get(reason, 0) + 1
            if found is not None:
                open_bound = min(open_bound, self.weights[place] * found.bound_seconds)
                if found.solution is not None:
                    best = self._with(best, Ranked(place, found.solution))
                    self._tell(done, best[0] if best[0].table == place else None)
        return self._outcome(best, open_bound, pruned)

    def _goal(self, best: list[Ranked]) -> float:
        return self._value(best[-1]) if len(best) >= self.number else np.inf

    def _value(self, ranked: Ranked) -> float:
        return self.weights[ranked.table] * ranked.solution.step_seconds

    def _reason_to_stop(self, bound: float, best: list[Ranked]) -> str | None:
        if bound >= self._goal(best) * (1 - self.tolerance):
            return BY_BOUND
        return BY_TIME if best and self.clock.is_over else None

    def _with(self, best: list[Ranked], ranked: Ranked) -> list[Ranked]:
        return sorted([*best, ranked], key=self._value)[: self.number]

    def _tell(self, done: int, better: Ranked | None) -> None:
        if self.watch is not None:
            self.watch(done, len(self.tables), better)

    def _outcome(self, best: list[Ranked], open_bound: float, pruned: dict[str, int]) -> Outcome:
        gap = max(0.0, 1 - open_bound / self._value(best[0])) if best else 0.0
        return Outcome(
            best=tuple(best),
            gap=0.0 if gap < _ROUNDING else gap,
            priced=len(self.tables),
            pruned=tuple(sorted(pruned.items())),
            is_time_limited=BY_TIME in pruned,
        )


_ROUNDING = 1e-8


# ----------------------------------------------------------------------------------------------- step time against
# memory


@dataclass(frozen=True)
class ParetoPoint:
    """The best plan under one budget."""

    usable_bytes: float
    best: Ranked


def pareto_front(
    tables: Sequence[CostTable], budgets: Sequence[float], *, tolerance: float = 1e-3, clock: Clock | None = None
) -> tuple[ParetoPoint, ...]:
    """The best plans under each of `budgets` (usable bytes of a device), ascending; those where something fits.

    A budget under which nothing is faster than under a smaller one is left out.
    """
    points: list[ParetoPoint] = []
    for usable in sorted(budgets):
        found = best_plans(
            [replace(table, usable_bytes=usable) for table in tables], tolerance=tolerance, clock=clock or Clock()
        )
        seconds = points[-1].best.solution.step_seconds if points else np.inf
        if found.best and found.best[0].solution.step_seconds < seconds * (1 - tolerance):
            points.append(ParetoPoint(usable, found.best[0]))
    return tuple(points)


def budgets_between(tables: Sequence[CostTable], number: int) -> tuple[float, ...]:
    """`number` budgets from the least that any table can do with to the tables' own, in equal ratios."""
    least = min(least_usable_bytes(table)[0] for table in tables) * (1 + 1e-9)
    most = max(table.usable_bytes for table in tables)
    return tuple(np.geomspace(least, max(most, least), number).tolist())
