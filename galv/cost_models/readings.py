"""How far the readings of a measured profile lie from the analytic curves, at any shape or size.

A curve gives the form between and beyond what was measured, a reading its height: at a measured shape the price is the
reading, elsewhere the curve times the ratio of reading and curve, interpolated over the logarithms of the sizes. Along
one size that is linear; over shapes it is Shepard's inverse-distance weighting (ACM 1968) of the nearest readings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log

Place = tuple[float, ...]
"""Logarithms of sizes."""
Ratios = tuple[tuple[Place, float], ...]
"""(place, logarithm of reading over curve)."""

NEIGHBOURS = 8
"""Readings that count for a shape: the corners of a box in three sizes."""


def place(*sizes: float) -> Place:
    """The sizes as interpolation sees them."""
    return tuple(log(max(size, 1e-12)) for size in sizes)


def ratio_at(ratios: Ratios, where: Place) -> float:
    """Reading over curve at `where`; 1 where nothing was read."""
    if not ratios:
        return 1.0
    return exp(_along(ratios, where[0]) if len(where) == 1 else _among(ratios, where))


def _along(ratios: Ratios, where: float) -> float:
    """Linear between neighbours, level beyond the ends; `ratios` are sorted."""
    places = [point[0] for point, _ in ratios]
    after = bisect_left(places, where)
    if after == 0 or after == len(places):
        return ratios[min(after, len(places) - 1)][1]
    (low,), below = ratios[after - 1]
    (high,), above = ratios[after]
    return below + (above - below) * (where - low) / (high - low)


def _among(ratios: Ratios, where: Place) -> float:
    near = sorted((sum((a - b) ** 2 for a, b in zip(point, where, strict=True)), value) for point, value in ratios)
    if near[0][0] < 1e-9:
        return near[0][1]
    weights = [(distance**-2, value) for distance, value in near[:NEIGHBOURS]]
    return sum(weight * value for weight, value in weights) / sum(weight for weight, _ in weights)


def ratios(points: Sequence[tuple[Place, float, float]]) -> Ratios:
    """(place, read seconds, seconds of the curve) as ratios, sorted; equal places are averaged."""
    found: dict[Place, list[float]] = {}
    for where, read, curve in points:
        if curve > 0:
            found.setdefault(where, []).append(log(read / curve))
    return tuple(sorted((where, sum(values) / len(values)) for where, values in found.items()))
