"""The outer loop: every layout of the space, best first, until none left can beat the best plan found.

Each candidate fixes the degrees, the schedule and the microbatch. Its cheap bound (memory ignored, stages even) orders
the candidates; `search.solve` finds the best plan of one. The loop ends when the next bound is no better than the best
plan: what is left over cannot win, so the plan is optimal in the space, up to the gap that cutting stages left open.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import Degrees, FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import binding_stage
from galv.planner.plan import SearchReport
from galv.planner.plan_table import gib, gib_enough
from galv.planner.reporter import Reporter
from galv.planner.search.solve import Solution, least_usable_bytes, lower_bound_seconds, solve
from galv.planner.space import Candidate, describe, exclusion
from galv.planner.tables import Limits, PricedTable, priced_tables


@dataclass(frozen=True)
class Answer:
    """The best plan found, in the search's own terms."""

    priced: PricedTable
    solution: Solution
    report: SearchReport


def best_plan(
    shared: FactsPricer,
    found: Sequence[Candidate],
    budget_bytes: int,
    *,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    reporter: Reporter | None = None,
) -> Answer:
    """The fastest plan over `found` that fits. Raises NoFeasiblePlan, or UsageError when no candidate can exist."""
    started = time.perf_counter()
    reporter = reporter or Reporter()
    tables = _tables(shared, found, budget_bytes, limits, reporter)
    tables.sort(key=lambda item: item[0])
    best: tuple[PricedTable, Solution] | None = None
    bound = float("inf")
    for done, (cheap_bound, priced) in enumerate(tables):
        reporter.progress(done, len(tables))
        least = best[1].step_seconds if best else float("inf")
        if cheap_bound >= least:
            bound = min(bound, cheap_bound)
            break
        solution = solve(priced.table, incumbent_seconds=least)
        if solution is None:
            continue
        bound = min(bound, solution.bound_seconds)
        if solution.step_seconds < least:
            best = priced, solution
            reporter.note(f"{solution.step_seconds:.4g} s: {describe(priced.candidate)}")
    reporter.progress(len(tables), len(tables))
    if best is None:
        raise _infeasible([priced for _, priced in tables], budget_bytes)
    gap = max(0.0, 1 - bound / best[1].step_seconds)
    gap = 0.0 if gap < 1e-9 else gap
    report = SearchReport(
        seconds=time.perf_counter() - started, candidates=len(tables), proven_optimal=gap == 0.0, gap=gap
    )
    return Answer(*best, report)


def _tables(
    shared: FactsPricer, found: Sequence[Candidate], budget_bytes: int, limits: Limits, reporter: Reporter
) -> list[tuple[float, PricedTable]]:
    reporter.phase("pricing")
    excluded: dict[Degrees | None, str | None] = {None: None}
    tables: list[tuple[float, PricedTable]] = []
    for done, candidate in enumerate(found):
        reporter.progress(done, len(found))
        uniform = candidate.uniform
        if uniform is not None and uniform not in excluded:
            excluded[uniform] = exclusion(shared, uniform)
        if excluded[uniform] is None:
            priced = priced_tables(shared, candidate, budget_bytes, limits)
            tables += [(lower_bound_seconds(one.table), one) for one in priced]
    if not tables:
        reasons = sorted({reason for reason in excluded.values() if reason})
        raise UsageError("no layout can exist for this model here: " + "; ".join(reasons))
    reporter.phase("searching")
    return tables


def _infeasible(tables: Sequence[PricedTable], budget_bytes: int) -> NoFeasiblePlan:
    """The error that names the smallest budget that would do, and where the memory goes in the plan that needs it."""
    least, closest = min(((least_usable_bytes(priced.table)[0], priced) for priced in tables), key=lambda pair: pair[0])
    needed = ceil(least) + reserved_bytes(least, closest.pricer.cluster.device)
    roomy = replace(closest.table, usable_bytes=least * (1 + 1e-9) + 1)
    smallest = solve(roomy)
    causes = () if smallest is None else binding_stage(replace(closest, table=roomy), smallest)
    return NoFeasiblePlan(
        f"no plan fits in {gib(budget_bytes)} GiB per device. The smallest budget that would do is "
        f"{gib_enough(needed)} GiB, with {describe(closest.candidate)}:",
        smallest_budget_bytes=needed,
        causes=causes,
    )
