"""What would make a plan fit where none does: single changes of the request, each tried by really solving it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import FactsPricer
from galv.errors import UsageError
from galv.planner.clusters import with_nodes
from galv.planner.constraints import Constraints
from galv.planner.plan_table import gib_enough, seconds
from galv.planner.planner import all_tables
from galv.planner.reporter import Reporter
from galv.planner.search.memory import least_usable_bytes
from galv.planner.search.solve import solve
from galv.planner.space import RUNS, Candidate, Features, Request, candidates, describe, tensor_degrees
from galv.planner.tables import Limits, PricedTable

TRY_SECONDS = 3.0
"""How long changes are tried, of the processor's time; the one at hand is finished."""


@dataclass(frozen=True)
class Change:
    """One change of a request, or several that only help together with its size."""

    text: str
    shared: FactsPricer
    request: Request
    limits: Limits


@dataclass(frozen=True)
class Relaxation:
    """A change under which a plan fits."""

    change: str
    needed_bytes: int
    """The smallest budget per device that would then do, among the layouts tried."""
    step_seconds: float
    """Of the layout that needs it, at its best in the budget given."""
    layout: str

    def __str__(self) -> str:
        needed = f"needs {gib_enough(self.needed_bytes)} GiB"
        return f"{self.change}: {self.layout} {needed} ({seconds(self.step_seconds)} a step)"


def relaxations(
    shared: FactsPricer, request: Request, limits: Limits, features: Features = RUNS
) -> tuple[tuple[Relaxation, ...], tuple[str, ...]]:
    """(the changes that make a plan fit, the least of each sort; the sorts of changes that do not, or were not tried).

    Changes that need no hardware come first.
    """
    end = time.process_time() + TRY_SECONDS
    found: list[Relaxation] = []
    missed: list[str] = []
    for name, sort in _sorts(shared, request, limits):
        relaxation = _least(sort, features, end)
        if relaxation is not None:
            found.append(relaxation)
        else:
            missed.append(f"{name} (not tried to the end: time was up)" if time.process_time() > end else name)
    return tuple(found), tuple(missed)


def _least(sort: Iterator[Change], features: Features, end: float) -> Relaxation | None:
    """The first change that does, before the process has used `end` seconds."""
    for change in sort:
        if time.process_time() > end:
            return None
        relaxation = _tried(change, features)
        if relaxation is not None:
            return relaxation
    return None


def _sorts(shared: FactsPricer, request: Request, limits: Limits) -> Iterator[tuple[str, Iterator[Change]]]:
    """Changes by sort, the least first."""
    for demand in limits.constraints.demands:
        others = Constraints(tuple(one for one in limits.constraints.demands if one is not demand))
        name = f"without {demand}"
        yield name, iter([Change(f"no {demand}", shared, request, replace(limits, constraints=others))])
    if request.optimizer != "sgd":
        yield "--optimizer sgd", iter([Change("--optimizer sgd", shared, replace(request, optimizer="sgd"), limits)])
    yield "more nodes", _with_more_nodes(shared, request, limits)
    yield (
        "a smaller global batch",
        (
            Change(f"--global-batch {batch}", shared, replace(request, global_batch=batch), limits)
            for batch in _halves(request.global_batch)
        ),
    )


def _with_more_nodes(shared: FactsPricer, request: Request, limits: Limits) -> Iterator[Change]:
    now = shared.cluster.num_nodes
    for nodes in (2 * now, 4 * now, 8 * now, 16 * now):
        for cluster in with_nodes(shared.cluster, nodes):
            yield Change(f"{nodes} nodes in place of {now}", FactsPricer(shared.graph, cluster), request, limits)


def _halves(number: int) -> Iterator[int]:
    while number % 2 == 0:
        number //= 2
        yield number


def _tried(change: Change, features: Features) -> Relaxation | None:
    """What `change` achieves; None where nothing fits even so."""
    shared, request = change.shared, change.request
    try:
        found = _lean(shared, candidates(shared.graph, shared.cluster, request, features))
        tables = all_tables([(shared, found)], request.budget_bytes, change.limits, Reporter())
    except UsageError:
        return None
    least, closest = min(((least_usable_bytes(one.table)[0], one) for one in tables), key=lambda pair: pair[0])
    return _solved(change, closest, least) if least <= closest.table.usable_bytes else None


def _solved(change: Change, priced: PricedTable, least_bytes: float) -> Relaxation | None:
    solution = solve(priced.table, tolerance=0.01).solution
    if solution is None:
        return None
    needed = ceil(least_bytes) + reserved_bytes(least_bytes, priced.pricer.cluster.device)
    return Relaxation(change.text, needed, solution.step_seconds, describe(priced.candidate))


def _lean(shared: FactsPricer, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that need least: one chunk a rank, few microbatches in flight, and one sample at once."""
    kept = []
    for candidate in found:
        outer = candidate.outer
        degrees = tensor_degrees(candidate.num_devices, shared.cluster)
        is_small = any(outer.microbatch(candidate.num_devices // tp) == 1 for tp in degrees)
        is_short = outer.schedule in ("none", "1f1b") or outer.num_microbatches < outer.pp
        if is_small and is_short and outer.virtual_stages == 1:
            kept.append(candidate)
    return kept
