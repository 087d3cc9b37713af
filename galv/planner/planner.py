"""The outer loop: every layout of the space is priced, and the best plan over all of them found (`search.outer`).

Each candidate fixes the degrees, the schedule and the microbatch, and gives one table or more. The result is proven
optimal in the space, or comes with the gap that is left.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf
from typing import Literal

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import binding_stage
from galv.planner.kinds import pipeline_choice, unit_kind
from galv.planner.plan import SearchReport
from galv.planner.plan_table import gib, gib_enough, seconds
from galv.planner.promising import Promising, promising
from galv.planner.reporter import Reporter
from galv.planner.search.memory import least_memory, least_usable_bytes
from galv.planner.search.outer import BY_BOUND, BY_TIME, Outcome, Standing, best_plans
from galv.planner.search.solution import Clock, Solution
from galv.planner.search.solve import solve
from galv.planner.space import Candidate, describe, impossible
from galv.planner.tables import Limits, PricedTable, priced_tables
from galv.planner.unmet import unmet

Objective = Literal["throughput", "memory", "cost"]
"""The fastest step, the least peak memory, or the fewest device-seconds a sample, where fewer devices may do better."""
Space = tuple[FactsPricer, Sequence[Candidate]]
"""The candidates of one cluster, with its prices."""


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
        [(shared, found)],
        budget_bytes,
        1,
        limits=limits,
        reporter=reporter,
        objective=objective,
        time_limit_seconds=time_limit_seconds,
        tolerance=tolerance,
    )[0]


def best_answers(
    spaces: Sequence[Space],
    budget_bytes: int,
    number: int,
    *,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    reporter: Reporter | None = None,
    objective: Objective = "throughput",
    time_limit_seconds: float | None = None,
    tolerance: float = 0.0,
) -> tuple[Answer, ...]:
    """The `number` best plans of different layouts over all `spaces`, best first. Arguments and errors as for
    `best_plan`.

    By `cost` a plan's seconds count times the devices of its space's cluster; its gap is that of device-seconds.
    """
    started = time.perf_counter()
    clock = Clock.limited(time_limit_seconds)
    reporter = reporter or Reporter()
    if number == 1 and objective == "throughput" and len(spaces) == 1:
        left = _worth_pricing(spaces[0], budget_bytes, limits, clock, reporter)
    else:
        left = Promising(all_tables(spaces, budget_bytes, limits, reporter), 0, inf, frozenset())
    priced, wanted = left.tables, number
    if objective == "memory":
        priced = _of_least_memory(priced, number)
        wanted = len(priced)
    outcome = best_plans(
        [one.table for one in priced],
        wanted,
        weights=[one.pricer.cluster.num_devices if objective == "cost" else 1.0 for one in priced],
        tolerance=tolerance,
        clock=clock,
        watch=lambda standing: _tell(reporter, standing, priced),
        alike=lambda ranked: _laid_out(priced[ranked.table], ranked.solution),
    )
    reporter.progress(len(priced), len(priced))
    if not outcome.best:
        raise _infeasible(priced, budget_bytes)
    report = _report(outcome, left, time.perf_counter() - started)
    best = outcome.best
    if objective == "memory":
        best = tuple(sorted(best, key=lambda ranked: priced[ranked.table].table.usable_bytes))[:number]
    return tuple(Answer(priced[one.table], one.solution, report) for one in best)


def _tell(reporter: Reporter, standing: Standing, priced: Sequence[PricedTable]) -> None:
    reporter.progress(standing.done, standing.total)
    if standing.best is None:
        return
    best = seconds(standing.best.solution.step_seconds)
    reporter.standing(f"best {best}, at most {100 * standing.gap:.2g} % from optimal")
    if standing.is_new:
        reporter.note(f"{best}: {describe(priced[standing.best.table].candidate)}")


def _laid_out(priced: PricedTable, solution: Solution) -> Hashable:
    """What a plan lays out: of several that differ in their schedule alone, the best is enough."""
    outer, starts = priced.candidate.outer, pairwise(solution.cut)
    stages = [
        tuple(option.strategy for option in stage.ordered(priced.table.chain[start:stop]))
        for (start, stop), stage in zip(starts, solution.stages, strict=True)
    ]
    return priced.pricer.cluster.num_devices, outer.num_microbatches, tuple(stages)


def _of_least_memory(priced: Sequence[PricedTable], number: int) -> list[PricedTable]:
    """The tables with the `number` least peaks, each with no more memory than that; all where none of them fits."""
    least = [least_usable_bytes(one.table)[0] for one in priced]
    most = sorted(least)[min(number, len(least)) - 1] * (1 + 1e-9)
    kept = [one for one, usable in zip(priced, least, strict=True) if usable <= min(most, one.table.usable_bytes)]
    return [replace(one, table=least_memory(one.table)) for one in kept] or list(priced)


def _report(outcome: Outcome, left: Promising, taken_seconds: float) -> SearchReport:
    gap = max(outcome.gap, 1 - left.open_seconds / outcome.best[0].solution.step_seconds)
    dropped = BY_BOUND if left.open_seconds == inf else BY_TIME
    pruned = dict(outcome.pruned)
    if left.num_dropped:
        pruned[dropped] = pruned.get(dropped, 0) + left.num_dropped
    return SearchReport(
        seconds=taken_seconds,
        candidates=outcome.priced + left.num_dropped,
        proven_optimal=gap == 0.0,
        gap=gap,
        pruned=tuple(sorted(pruned.items())),
        is_time_limited=outcome.is_time_limited or dropped == BY_TIME,
    )


def _worth_pricing(space: Space, budget_bytes: int, limits: Limits, clock: Clock, reporter: Reporter) -> Promising:
    """The tables of the candidates that the limits allow and that may have the best plan. Errors as `all_tables`."""
    shared, found = space
    reporter.phase("pricing")
    limits.constraints.check([unit_kind(shared.graph, unit) for unit in shared.graph.units])
    allowed = [one for one in found if limits.constraints.allow_pipeline(pipeline_choice(one))]
    left = promising(shared, allowed, budget_bytes, limits, clock, reporter)
    _check_any(left.tables, [space], limits, left.reasons)
    reporter.phase("searching")
    return left


def all_tables(spaces: Sequence[Space], budget_bytes: int, limits: Limits, reporter: Reporter) -> list[PricedTable]:
    """The tables of all candidates that the limits allow. Raises UsageError when there are none, saying why."""
    reporter.phase("pricing")
    total, done = sum(len(found) for _, found in spaces), 0
    tables: list[PricedTable] = []
    reasons: set[str] = set()
    for shared, found in spaces:
        limits.constraints.check([unit_kind(shared.graph, unit) for unit in shared.graph.units])
        for candidate in found:
            reporter.progress(done, total)
            done += 1
            reason = impossible(shared, candidate)
            if reason is not None:
                reasons.add(reason)
            elif limits.constraints.allow_pipeline(pipeline_choice(candidate)):
                tables += priced_tables(shared, candidate, budget_bytes, limits)
    _check_any(tables, spaces, limits, reasons)
    reporter.phase("searching")
    return tables


def _check_any(tables: Sequence[PricedTable], spaces: Sequence[Space], limits: Limits, reasons: Set[str]) -> None:
    """Nothing when there are tables. Raises UsageError saying why there are none."""
    if not tables and limits.constraints.demands:
        raise unmet(spaces, limits)
    if not tables:
        raise UsageError("no layout can exist for this model here: " + "; ".join(sorted(reasons)))


def _infeasible(tables: Sequence[PricedTable], budget_bytes: int) -> NoFeasiblePlan:
    """The error that names the smallest budget that would do, and where the memory goes in the plan that needs it."""
    # Ranks of all other schedules hold at least as many microbatches as the fullest of 1F1B, and cuts are freer here.
    plain = [priced for priced in tables if priced.table.schedule in ("none", "gpipe", "1f1b")] or tables
    least, closest = min(((least_usable_bytes(priced.table)[0], priced) for priced in plain), key=lambda pair: pair[0])
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
