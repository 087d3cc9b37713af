"""A bound on every plan of a table that costs microseconds: cuts and whole numbers relaxed away.

*Work.* Let m t_s + e_s be the busy seconds of stage s of p. All stages together hold at most p x usable bytes, so the
sum R of their busy seconds is at least

    min  sum of seconds of all units   subject to   sum of held bytes  <=  p (usable - least working bytes)

with every unit free to mix options: a linear program that a greedy walk solves, from the fastest option of every unit
giving up seconds for bytes along the classes' convex hulls, cheapest exchange first (Dantzig 1957). Each unit is taken
to hold the activations that the rank with fewest microbatches in flight keeps. The step T is at least R / p, under
whatever schedule.

*Bubble.* The step is at least as long as the critical path through any stage k (see `solve`), hence as their mean over
all k. With S the least sum of the t_s: under GPipe the mean path is R / p + S - S / p. Under 1F1B with m >= p it is
R / p + 2/p sum of s t_s; as no t_s exceeds T / m, that sum is least when the first stages are full, at least
S (m S / T - 1) / 2. Solved for T,

    T  >=  (a + sqrt(a^2 + 4 m S^2 / p)) / 2,   a = (R - S) / p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, sqrt

from galv.planner.plan import ScheduleName
from galv.planner.search.shape import Shape
from galv.planner.search.table import CostTable, Option


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A step along a hull: so many seconds more for so many bytes less, for every unit of a class."""

    seconds: float
    saved_bytes: float

    @property
    def price(self) -> float:
        return self.seconds / self.saved_bytes


def relaxed_bound_seconds(table: CostTable) -> float:
    """Seconds that no plan of `table` can stay below; infinite when not even the relaxation fits."""
    work, stages, rounds = _least_work_seconds(table), table.num_stages, table.num_microbatches
    steady = sum(min(o.forward_seconds + o.backward_seconds for o in table.options[name]) for name in table.chain)
    return steady_bound_seconds(work, steady, table.schedule, stages, rounds)


def steady_bound_seconds(
    work_seconds: float, steady_seconds: float, schedule: ScheduleName, num_stages: int, num_microbatches: int
) -> float:
    """Seconds that no step stays below whose stages have at least `work_seconds` to do, all together.

    `steady_seconds` is their least for one microbatch.
    """
    work, steady, stages, rounds = work_seconds, steady_seconds, num_stages, num_microbatches
    if stages == 1 or not isfinite(work):
        return work
    if schedule == "gpipe" or (schedule == "1f1b" and rounds < stages):
        return work / stages + steady - steady / stages
    if schedule != "1f1b":
        return work / stages
    slack = (work - steady) / stages
    return (slack + sqrt(slack**2 + 4 * rounds * steady**2 / stages)) / 2


def _least_work_seconds(table: CostTable) -> float:
    """The least sum of all stages' busy seconds with the memory of all stages together."""
    counts = {name: table.chain.count(name) for name in set(table.chain)}
    shape = Shape.of(table)
    in_flight = min(shape.in_flight(rank) for rank in range(shape.num_ranks))
    seconds = held = 0.0
    exchanges: list[_Exchange] = []
    for name, number in counts.items():
        hull = _hull(table.options[name], table.num_microbatches, in_flight)
        held += number * hull[0][0]
        seconds += number * hull[0][1]
        exchanges += [_Exchange(number * (t - s), number * (h - g)) for (h, s), (g, t) in pairwise(hull)]
    working = min(option.working_bytes for name in counts for option in table.options[name])
    excess = held - table.num_stages * (table.usable_bytes - working)
    return seconds + _least_price(exchanges, excess)


def _least_price(exchanges: list[_Exchange], excess_bytes: float) -> float:
    """The fewest seconds for which `excess_bytes` can be saved."""
    paid = 0.0
    for exchange in sorted(exchanges, key=lambda e: e.price):
        if excess_bytes <= 0:
            return paid
        share = min(1.0, excess_bytes / exchange.saved_bytes)
        paid += share * exchange.seconds
        excess_bytes -= share * exchange.saved_bytes
    return paid if excess_bytes <= 1e-6 * abs(paid) + 1 else inf


def _hull(options: Sequence[Option], num_microbatches: int, in_flight: float) -> list[tuple[float, float]]:
    """The lower convex hull of (held bytes, seconds), from the fastest option to the one that holds least."""
    points = sorted(
        {(o.held_bytes(in_flight), o.seconds(num_microbatches)) for o in options}, key=lambda p: (p[1], p[0])
    )
    hull: list[tuple[float, float]] = []
    for point in points:
        if hull and point[0] >= hull[-1][0]:
            continue
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Seconds paid for each byte saved."""
    return (b[1] - a[1]) / (a[0] - b[0])
