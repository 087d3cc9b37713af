"""The outer problem: which of many tables has the best plan. Best-first branch and bound, a pure function of the
tables.

Tables are looked at in the order of a cheap bound, each with the best plan so far as the one to beat, until no bound
left is below it. What is minimized is a table's weight times the step: weights of 1 give the most throughput,
numbers of devices the least cost of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from galv.planner.search.memory import least_usable_bytes
from galv.planner.search.solution import Clock, Solution
from galv.planner.search.solve import lower_bound_seconds, solve
from galv.planner.search.table import CostTable

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
class Standing:
    """How far a search is."""

    done: int
    """Tables done, of `total`."""
    total: int
    best: Ranked | None
    """The best plan so far."""
    is_new: bool
    """Whether it was just found."""
    gap: float
    """At most this share of its weighted step could still be saved."""


Watch = Callable[[Standing], None]


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
    alike: Callable[[Ranked], Hashable] | None = None,
) -> Outcome:
    """The `number` best plans of different tables; `tolerance` is the gap that is good enough to stop at.

    Of plans for which `alike` gives the same only the best counts. With one plan wanted the gap is a proof over all
    tables; with several, it holds for the best of them.
    """
    alike = alike or (lambda ranked: ranked.table)
    return _Search(tables, number, weights or [1.0] * len(tables), tolerance, clock or Clock(), watch, alike).run()


@dataclass(eq=False)
class _Search:
    """One run."""

    tables: Sequence[CostTable]
    number: int
    weights: Sequence[float]
    tolerance: float
    clock: Clock
    watch: Watch | None
    alike: Callable[[Ranked], Hashable]

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
            self._tell(done, best, min(open_bound, bounds[place]))
            goal = self._goal(best) / self.weights[place]
            found = solve(self.tables[place], incumbent_seconds=goal, tolerance=self.tolerance, clock=self.clock)
            if found is None or found.solution is None:
                reason = BY_CUTS if np.isfinite(goal) and np.isfinite(bounds[place]) else BY_MEMORY
                pruned[reason] = pruned.get(reason, 0) + 1
            if found is not None:
                open_bound = min(open_bound, self.weights[place] * found.bound_seconds)
                if found.solution is not None:
                    best = self._with(best, Ranked(place, found.solution))
                    self._tell(done, best, min(open_bound, bounds[place]), is_new=best[0].table == place)
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
        unlike: dict[Hashable, Ranked] = {}
        for one in sorted([*best, ranked], key=self._value):
            unlike.setdefault(self.alike(one), one)
        return list(unlike.values())[: self.number]

    def _tell(self, done: int, best: list[Ranked], bound: float, *, is_new: bool = False) -> None:
        if self.watch is not None:
            first = best[0] if best else None
            self.watch(Standing(done, len(self.tables), first, is_new, self._gap(best, bound)))

    def _gap(self, best: list[Ranked], bound: float) -> float:
        gap = max(0.0, 1 - bound / self._value(best[0])) if best else 0.0
        return 0.0 if gap < _ROUNDING else gap

    def _outcome(self, best: list[Ranked], open_bound: float, pruned: dict[str, int]) -> Outcome:
        return Outcome(
            best=tuple(best),
            gap=self._gap(best, open_bound),
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
    tables: Sequence[CostTable],
    budgets: Sequence[float],
    *,
    tolerance: float = 1e-3,
    time_limit_seconds: float | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[ParetoPoint, ...]:
    """The best plans under each of `budgets` (usable bytes of a device), ascending; those where something fits.

    A budget under which nothing is faster than under a smaller one is left out. The time limit is shared out evenly;
    `watch` is told how many budgets of how many are done.
    """
    points: list[ParetoPoint] = []
    each = None if time_limit_seconds is None else time_limit_seconds / max(len(budgets), 1)
    for done, usable in enumerate(sorted(budgets)):
        if watch is not None:
            watch(done, len(budgets))
        found = best_plans(
            [replace(table, usable_bytes=usable) for table in tables], tolerance=tolerance, clock=Clock.limited(each)
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
