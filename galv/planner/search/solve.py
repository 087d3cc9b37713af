"""The best plan of one outer choice: where to cut the chain, what each stage does, and a lower bound as proof.

The step time of a cut is the simulated schedule over its chunks plus the longest once-a-step work. With one stage there is
nothing to cut and the inner problem is the answer. A pipeline of one chunk a rank is squeezed (`line`), one of several
chunks a rank is spread (`loops`); where the cuts are few, all of them are looked at (`every`).
"""

from __future__ import annotations

from itertools import groupby
from math import comb

import numpy as np

from galv.planner.search.assign import Assigner
from galv.planner.search.every import best_of_every_cut
from galv.planner.search.line import Line
from galv.planner.search.loops import Loops
from galv.planner.search.relax import relaxed_bound_seconds
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Clock, Solution, better
from galv.planner.search.table import CostTable

MAX_CUTS = 40
"""So many cuts are all looked at, where the bounds leave a gap."""
_TOLERANCE = 1e-9


def lower_bound_seconds(table: CostTable) -> float:
    """A cheap bound on every plan of `table`: whole numbers and cuts relaxed, or its longest unit alone."""
    longest = max(min(o.forward_seconds + o.backward_seconds for o in table.options[name]) for name in set(table.chain))
    return max(relaxed_bound_seconds(table), table.num_microbatches * longest)


def solve(
    table: CostTable, *, incumbent_seconds: float = np.inf, tolerance: float = 0.0, clock: Clock | None = None
) -> Solution | None:
    """The best plan of `table`; None when nothing fits, or nothing can beat `incumbent_seconds`.

    A solution within `tolerance` (a share of its seconds) of the bound is good enough to stop at. `clock` ends the search
    early: what was found until then is returned with its bound.
    """
    clock = clock or Clock()
    shape = Shape.of(table)
    if shape.num_chunks > len(table.chain):
        return None
    if shape.num_chunks == 1:
        return _single(table, shape, incumbent_seconds)
    walk = Line if table.virtual_stages == 1 else Loops
    found = walk(table, shape, incumbent_seconds, tolerance, clock).solve()
    goal = min(incumbent_seconds, found.best.step_seconds if found.best else np.inf)
    is_open = found.bound_seconds < goal * (1 - max(tolerance, _TOLERANCE))
    if is_open and comb(len(table.chain) - 1, shape.num_chunks - 1) <= MAX_CUTS and len(table.chain) <= 8:
        best, bound = best_of_every_cut(table, shape, goal), goal
        best = better(found.best, best)
        if best is not None:
            bound = min(bound, best.step_seconds)
        return None if best is None else best.bounded(bound)
    return None if found.best is None else found.best.bounded(found.bound_seconds)


def _single(table: CostTable, shape: Shape, incumbent_seconds: float) -> Solution | None:
    units = tuple((name, len(list(run))) for name, run in groupby(table.chain))
    choice = Assigner.of(table).fastest(
        units,
        in_flight=shape.in_flight(0),
        weights=shape.busy,
        usable_bytes=table.usable_bytes,
        at_most=incumbent_seconds,
    )
    if choice is None:
        return None
    seconds = shape.step_seconds([choice.busy])
    return Solution((0, len(table.chain)), (choice,), seconds, seconds)
