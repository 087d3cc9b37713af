"""Which candidates are worth a table: the others cannot beat a plan already found, by what their units compute alone.

A unit's own work, its data axes left out, is priced once for all candidates that divide it alike, and bounds the step
of each. Candidates are priced in the order of these bounds, until none left is below the best of some quick plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from galv.cost_models.unit import FactsPricer
from galv.planner.reporter import Reporter
from galv.planner.search.relax import steady_bound_seconds
from galv.planner.search.solution import Clock
from galv.planner.search.solve import lower_bound_seconds, solve
from galv.planner.space import Candidate, degrees_in, impossible
from galv.planner.tables import Limits, PricedTable, priced_tables


@dataclass(frozen=True)
class Promising:
    """The tables of the candidates that may have the best plan."""

    tables: list[PricedTable]
    num_dropped: int
    """Candidates that cannot win."""
    open_seconds: float
    """A bound on those that no time was left for; infinite when there are none."""
    reasons: frozenset[str]
    """Why candidates are impossible."""


def promising(
    shared: FactsPricer,
    found: Sequence[Candidate],
    budget_bytes: int,
    limits: Limits,
    clock: Clock,
    reporter: Reporter,
) -> Promising:
    """The tables of `found` but of those that cannot beat a quick plan of another."""
    reasons = {candidate: impossible(shared, candidate) for candidate in found}
    possible = [(own_seconds(shared, candidate), candidate) for candidate in found if reasons[candidate] is None]
    possible.sort(key=lambda one: one[0])
    tables: list[PricedTable] = []
    quick, done, open_seconds = inf, 0, inf
    for done, (bound, candidate) in enumerate(possible):
        if bound >= quick or (tables and clock.is_over):
            open_seconds = bound if bound < quick else inf
            break
        reporter.progress(done, len(possible))
        for priced in priced_tables(shared, candidate, budget_bytes, limits):
            tables.append(priced)
            quick = min(quick, _quick_seconds(priced, quick, clock))
    else:
        done = len(possible)
    return Promising(
        tables, len(possible) - done, open_seconds, frozenset(reason for reason in reasons.values() if reason)
    )


def own_seconds(shared: FactsPricer, candidate: Candidate) -> float:
    """A bound on the steps of `candidate`: its units' own computation and collectives, shared out evenly."""
    graph, outer, steady = shared.graph, candidate.outer, 0.0
    for name, number in graph.counts.items():
        least = inf
        for degrees in degrees_in(shared, candidate, name):
            samples = outer.microbatch(candidate.num_devices // degrees.num_ranks)
            if samples is not None and shared.exclusion(name, degrees) is None:
                own = shared.priced(name, degrees, samples)
                forward, backward = own.forward_seconds, own.backward_seconds
                least = min(least, forward + backward + own.forward_sent_seconds + own.backward_sent_seconds)
        steady += number * least
    return steady_bound_seconds(
        outer.num_microbatches * steady, steady, outer.schedule, outer.pp, outer.num_microbatches
    )


def _quick_seconds(priced: PricedTable, goal_seconds: float, clock: Clock) -> float:
    """The step of a good plan of the table, found quickly; infinite when it is hardly better than `goal_seconds`."""
    if lower_bound_seconds(priced.table) > goal_seconds * (1 - _HARDLY):
        return inf
    found = solve(priced.table, incumbent_seconds=goal_seconds, tolerance=_QUICK, clock=clock).solution
    return inf if found is None else found.step_seconds


_QUICK = 0.1
"""A gap at which a quick plan is good enough."""
_HARDLY = 0.02
"""What a better quick plan has to save, at least, to be looked for."""
