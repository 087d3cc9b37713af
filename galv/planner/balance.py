"""Cuts of a chain whose units' costs are settled: the balanced ones, in microseconds.

With settled costs all cuts have the same sum over their stages, so what a schedule adds is decided by the slowest
stage and by where it stands. `balanced_cuts` gives two cuts of the least slowest stage: filled from the front and
filled from the back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from galv.cost_models.unit import Outer, UnitCost
from galv.planner.graph import UnitRef

_TOLERANCE = 1e-9
Stages = list[list[tuple[UnitRef, UnitCost]]]


def balanced_cuts(outer: Outer, units: Sequence[tuple[UnitRef, UnitCost]]) -> Iterator[Stages]:
    """The stages of the balanced cuts of `units`, each cut once."""
    num_stages = outer.pp * outer.virtual_stages
    seconds = [_busy_seconds(cost, outer.num_microbatches) for _, cost in units]
    least = least_largest_sum(seconds, num_stages)
    front = filled(seconds, num_stages, least)
    back = [len(units) - start for start in reversed(filled(seconds[::-1], num_stages, least))]
    for cut in dict.fromkeys((tuple(front), tuple(back))):
        yield [list(units[start:stop]) for start, stop in pairwise(cut)]


def _busy_seconds(cost: UnitCost, rounds: int) -> float:
    once = cost.step_exposed_seconds + cost.optimizer_seconds
    return rounds * (cost.compute_seconds + cost.exposed_seconds) + once


def least_largest_sum(values: Sequence[float], num_parts: int) -> float:
    """The least that the largest of `num_parts` consecutive, non-empty parts of `values` can add up to.

    By bisection over what a greedy filling needs; exact up to rounding.
    """
    low, high = max(max(values), sum(values) / num_parts), sum(values)
    if _num_filled(values, low) <= num_parts:
        return low
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_filled(values, middle) <= num_parts else (middle, high)
    return high


def _num_filled(values: Sequence[float], most: float) -> int:
    parts, filling = 1, 0.0
    for value in values:
        if filling + value > most * (1 + _TOLERANCE):
            parts, filling = parts + 1, 0.0
        filling += value
    return parts


def filled(values: Sequence[float], num_parts: int, most: float) -> list[int]:
    """Where parts start, and the number of values: each part as full as `most` allows that leaves every other one."""
    sums = list(accumulate(values, initial=0.0))
    cut = [0]
    for part in range(1, num_parts):
        start, left = cut[-1], num_parts - part
        stop = bisect_right(sums, sums[start] + most * (1 + 2 * _TOLERANCE)) - 1
        cut.append(max(start + 1, min(stop, len(values) - left)))
    return [*cut, len(values)]
