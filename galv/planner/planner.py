"""The outer loop: every layout of the space is priced, and the best plan over all of them found (`search.outer`).

Each candidate fixes the degrees, the schedule and the microbatch, and gives one table or more. The result is proven
optimal in the space, or comes with the gap that is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import binding_stage
from galv.planner.plan import SearchReport
from galv.planner.plan_table import gib, gib_enough
from galv.planner.promising import Promising, promising
from galv.planner.reporter import Reporter
from galv.planner.search.memory import least_memory, least_usable_bytes
from galv.planner.search.outer import BY_BOUND, BY_TIME, Outcome, Ranked, best_plans
from galv.planner.search.solution import Clock, Solution
from galv.planner.search.solve import solve
from galv.planner.space import Candidate, describe, impossible
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
    reporter.phase("pricing")
    if number == 1 and objective != "memory":
        left = promising(shared, found, budget_bytes, limits, clock, reporter)
    else:
        left = _tables(shared, found, budget_bytes, limits, reporter)
    if not left.tables:
        raise UsageError("no layout can exist for this model here: " + "; ".join(sorted(left.reasons)))
    reporter.phase("searching")
    priced, tables = left.tables, [one.table for one in left.tables]
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
    report = _report(outcome, left, time.perf_counter() - started)
    return tuple(Answer(priced[one.table], one.solution, report) for one in outcome.best)


def _report(outcome: Outcome, left: Promising, seconds: float) -> SearchReport:
    gap = max(outcome.gap, 1 - left.open_seconds / outcome.best[0].solution.step_seconds)
    dropped = BY_BOUND if left.open_seconds == inf else BY_TIME
    pruned = dict(outcome.pruned)
    if left.num_dropped:
        pruned[dropped] = pruned.get(dropped, 0) + left.num_dropped
    return SearchReport(
        seconds=seconds,
        candidates=outcome.priced + left.num_dropped,
        proven_optimal=gap == 0.0,
        gap=gap,
        pruned=tuple(sorted(pruned.items())),
        is_time_limited=outcome.is_time_limited or dropped == BY_TIME,
    )


def _tables(
    shared: FactsPricer, found: Sequence[Candidate], budget_bytes: int, limits: Limits, reporter: Reporter
) -> Promising:
    """The tables of all candidates."""
    tables: list[PricedTable] = []
    reasons: set[str] = set()
    for done, candidate in enumerate(found):
        reporter.progress(done, len(found))
        reason = impossible(shared, candidate)
        if reason is None:
            tables += priced_tables(shared, candidate, budget_bytes, limits)
        else:
            reasons.add(reason)
    return Promising(tables, 0, inf, frozenset(reasons))


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
