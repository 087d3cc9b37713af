"""The outer loop: every layout of the space is priced, and the best plan over all of them found (`search.outer`).

Each candidate fixes the degrees, the schedule and the microbatch, and gives one table or more. The result is proven
optimal in the space, or comes with the gap that is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import Degrees, FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import binding_stage
from galv.planner.plan import SearchReport
from galv.planner.plan_table import gib, gib_enough
from galv.planner.reporter import Reporter
from galv.planner.search.memory import least_memory, least_usable_bytes
from galv.planner.search.outer import Outcome, Ranked, best_plans
from galv.planner.search.solution import Clock, Solution
from galv.planner.search.solve import solve
from galv.planner.space import Candidate, describe, exclusion
from galv.planner.tables import Limits, PricedTable, priced_tables

Objective = Literal["throughput", "memory", "cost"]
"""The fastest step, the least peak memory, or the fewest device-seconds a sample: `cost` is `throughput` as long as all
candidates use all devices."""


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
    objective: Objective = "throughput",
    time_limit_seconds: float | None = None,
    tolerance: float = 0.0,
) -> Answer:
    """The best plan over `found` that fits. Raises NoFeasiblePlan, or UsageError when no candidate can exist.

    `tolerance` is the gap that is good enough to stop at; after `time_limit_seconds` the best plan so far is taken.
    What is then left open is the report's gap.
    """
    return best_answers(
        shared,
        found,
        budget_bytes,
        1,
        limits=limits,
        reporter=reporter,
        objective=objective,
        time_limit_seconds=time_limit_seconds,
        tolerance=tolerance,
    )[0]


def best_answers(
    shared: FactsPricer,
    found: Sequence[Candidate],
    budget_bytes: int,
    number: int,
    *,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    reporter: Reporter | None = None,
    objective: Objective = "throughput",
    time_limit_seconds: float | None = None,
    tolerance: float = 0.0,
) -> tuple[Answer, ...]:
    """The `number` best plans of different layouts, best first. Arguments and errors as for `best_plan`."""
    started = time.perf_counter()
    clock = Clock.limited(time_limit_seconds)
    reporter = reporter or Reporter()
    priced = _tables(shared, found, budget_bytes, limits, reporter)
    tables = [one.table for one in priced]
    if objective == "memory":
        least = [least_usable_bytes(table)[0] for table in tables]
        closest = min(range(len(tables)), key=lambda i: least[i])
        if least[closest] <= tables[closest].usable_bytes:
            tables = [least_memory(tables[closest])]
            priced = [replace(priced[closest], table=tables[0])]

    def watch(done: int, total: int, better: Ranked | None) -> None:
        reporter.progress(done, total)
        if better is not None:
            reporter.note(f"{better.solution.step_seconds:.4g} s: {describe(priced[better.table].candidate)}")

    outcome = best_plans(tables, number, tolerance=tolerance, clock=clock, watch=watch)
    reporter.progress(len(tables), len(tables))
    if not outcome.best:
        raise _infeasible(priced, budget_bytes)
    report = _report(outcome, time.perf_counter() - started)
    return tuple(Answer(priced[one.table], one.solution, report) for one in outcome.best)


def _report(outcome: Outcome, seconds: float) -> SearchReport:
    return SearchReport(
        seconds=seconds,
        candidates=outcome.priced,
        proven_optimal=outcome.gap == 0.0,
        gap=outcome.gap,
        pruned=outcome.pruned,
        is_time_limited=outcome.is_time_limited,
    )


def _tables(
    shared: FactsPricer, found: Sequence[Candidate], budget_bytes: int, limits: Limits, reporter: Reporter
) -> list[PricedTable]:
    reporter.phase("pricing")
    excluded: dict[Degrees | None, str | None] = {None: None}
    tables: list[PricedTable] = []
    for done, candidate in enumerate(found):
        reporter.progress(done, len(found))
        uniform = candidate.uniform
        if uniform is not None and uniform not in excluded:
            excluded[uniform] = exclusion(shared, uniform)
        if excluded[uniform] is None:
            tables += priced_tables(shared, candidate, budget_bytes, limits)
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
    smallest = solve(roomy).solution
    causes = () if smallest is None else binding_stage(replace(closest, table=roomy), smallest)
    return NoFeasiblePlan(
        f"no plan fits in {gib(budget_bytes)} GiB per device. The smallest budget that would do is "
        f"{gib_enough(needed)} GiB, with {describe(closest.candidate)}:",
        smallest_budget_bytes=needed,
        causes=causes,
    )
