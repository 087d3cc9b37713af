"""The best plan of one outer choice: where to cut the chain, what each stage does, and a lower bound as proof.

The step time of a cut is the simulated schedule over its chunks plus the longest once-a-step work. With one stage
there is nothing to cut and the inner problem is the answer. Under GPipe and 1F1B cells are squeezed until the best cut
is left (`line`); other schedules are cut evenly (`loops`). Where cuts are few, all of them are looked at (`every`).
"""

from __future__ import annotations

from dataclasses import dataclass
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
MAX_UNITS = 8
"""In chains of at most this length."""
MAX_OPTIONS = 8
"""Whose units have at most so many options."""
_TOLERANCE = 1e-9


def lower_bound_seconds(table: CostTable) -> float:
    """A cheap bound on every plan of `table`: whole numbers and cuts, or memory, relaxed, or its longest unit alone."""
    longest = max(min(o.forward_seconds + o.backward_seconds for o in table.options[name]) for name in set(table.chain))
    alone, shape = table.num_microbatches * longest, Shape.of(table)
    if shape.num_chunks > len(table.chain):
        return np.inf
    if not _is_even(shape) or _has_few_cuts(table, shape):
        return max(relaxed_bound_seconds(table), alone)
    # What ranks of these schedules hold at once takes longer to find than all of this.
    return max(Loops(table, shape, np.inf, 0.0, Clock()).floor_seconds(with_memory=False), alone)


def _is_even(shape: Shape) -> bool:
    """Whether the schedule's pipelines are cut evenly."""
    return shape.schedule not in ("none", "gpipe", "1f1b")


def _has_few_cuts(table: CostTable, shape: Shape) -> bool:
    cuts = comb(len(table.chain) - 1, shape.num_chunks - 1)
    most = max(len(options) for options in table.options.values())
    return cuts <= MAX_CUTS and len(table.chain) <= MAX_UNITS and most <= MAX_OPTIONS


@dataclass(frozen=True)
class Solved:
    """What is known of one table."""

    solution: Solution | None
    """The best plan found that beats the incumbent."""
    bound_seconds: float
    """No plan of the table takes less; no more than the incumbent's and the solution's seconds."""


def solve(
    table: CostTable, *, incumbent_seconds: float = np.inf, tolerance: float = 0.0, clock: Clock | None = None
) -> Solved:
    """The best plan of `table` that takes less than `incumbent_seconds`, if there is one, and a bound on all.

    A solution within `tolerance` (a share of its seconds) of the bound is good enough to stop at. `clock` ends the
    search early: what was found until then is returned with its bound.
    """
    clock = clock or Clock()
    shape = Shape.of(table)
    if shape.num_chunks > len(table.chain):
        return Solved(None, incumbent_seconds)
    if shape.num_chunks == 1:
        return _single(table, shape, incumbent_seconds)
    few, even = _has_few_cuts(table, shape), _is_even(shape)
    if even and few:
        return _closed(best_of_every_cut(table, shape, incumbent_seconds), incumbent_seconds)
    walk = (Loops if even else Line)(table, shape, incumbent_seconds, tolerance, clock)
    found = walk.solve()
    best, goal = found.best, incumbent_seconds if found.best is None else found.best.step_seconds
    if few and found.bound_seconds < goal * (1 - max(tolerance, _TOLERANCE)):
        best = better(best, best_of_every_cut(table, shape, goal))
        return _closed(best, incumbent_seconds)
    # A walk that stops at its tolerance has shown no more than that.
    return Solved(best, min(found.bound_seconds, goal))


def _closed(best: Solution | None, incumbent_seconds: float) -> Solved:
    """A table of which everything is known."""
    return Solved(best, incumbent_seconds if best is None else best.step_seconds)


def _single(table: CostTable, shape: Shape, incumbent_seconds: float) -> Solved:
    units = tuple((name, len(list(run))) for name, run in groupby(table.chain))
    choice = Assigner.of(table).fastest(
        units,
        in_flight=shape.in_flight(0),
        weights=shape.busy,
        usable_bytes=table.usable_bytes,
        at_most=incumbent_seconds,
    )
    seconds = np.inf if choice is None else shape.step_seconds([choice.busy])
    if choice is None or seconds >= incumbent_seconds:
        return _closed(None, incumbent_seconds)
    return _closed(Solution((0, len(table.chain)), (choice,), seconds), incumbent_seconds)
