"""Pareto frontiers of (bytes held, seconds) over consecutive units, with the layouts at both ends.

A frontier of n equal units is built by doubling, so depth costs its logarithm: two halves are put next to each other,
what lies between them is paid, and for each pair of end layouts only points stay that no other beats in both numbers.
Points that no optimum can use are dropped as well (`Price`). Dominated points never come back under addition, so
what is left holds every optimum (Bellman 1957; Held and Karp 1962 for the end states).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Price:
    """What a byte is worth, and how far above the least a point may lie to be kept.

    A unit costs `seconds + seconds_per_byte * bytes` in priced seconds. Whoever knows that an optimum lies within
    `slack` of the sum of all units' least priced seconds may drop every part that exceeds its own least sum by more.
    So with bytes: of what the units can spare altogether no part may take more.
    """

    seconds_per_byte: float = 0.0
    slack: float = np.inf
    spare_bytes: float = np.inf


@dataclass(frozen=True, eq=False)
class Frontier:
    """Ways to run some consecutive units. Arrays run over the ways."""

    first: np.ndarray
    """The first unit's layout."""
    last: np.ndarray
    held_bytes: np.ndarray
    seconds: np.ndarray
    floor: float
    """The units' least priced seconds, each on its own."""
    floor_bytes: float
    """The fewest bytes that they hold, each on its own."""
    parts: tuple[Frontier, Frontier] | None
    """The two frontiers this one is made of; None for one unit."""
    sources: tuple[np.ndarray, np.ndarray]
    """For each way its two parts' ways; of one unit twice the option."""

    def __len__(self) -> int:
        return len(self.seconds)

    def options(self, way: int) -> Iterator[int]:
        """The option of every unit, in order."""
        if self.parts is None:
            yield int(self.sources[0][way])
            return
        for part, source in zip(self.parts, self.sources, strict=True):
            yield from part.options(int(source[way]))


def of_unit(layouts: np.ndarray, held_bytes: np.ndarray, seconds: np.ndarray, price: Price) -> Frontier:
    """The frontier of one unit, from its options' numbers."""
    floor = float(np.min(seconds + price.seconds_per_byte * held_bytes, initial=np.inf))
    floor_bytes = float(np.min(held_bytes, initial=np.inf))
    priced = seconds + price.seconds_per_byte * held_bytes
    fit = np.nonzero((held_bytes <= floor_bytes + price.spare_bytes) & (priced <= floor + price.slack))[0]
    found = _Points(layouts[fit], layouts[fit], held_bytes[fit], seconds[fit], fit, fit)
    return _pruned(found, floor, floor_bytes, None)


def repeated(unit: Frontier, number: int, transitions: np.ndarray, price: Price) -> Frontier:
    """The frontier of `number` units like `unit`, by doubling."""
    if number == 1:
        return unit
    half = repeated(unit, number // 2, transitions, price)
    both = joined(half, half, transitions, price)
    return joined(both, unit, transitions, price) if number % 2 else both


def joined(a: Frontier, b: Frontier, transitions: np.ndarray, price: Price) -> Frontier:
    """The frontier of the units of `a` followed by those of `b`; `transitions[x, y]` seconds lie between layouts."""
    floor, floor_bytes = a.floor + b.floor, a.floor_bytes + b.floor_bytes
    seconds = a.seconds[:, None] + b.seconds[None, :] + transitions[a.last[:, None], b.first[None, :]]
    held = a.held_bytes[:, None] + b.held_bytes[None, :]
    fit = (held <= floor_bytes + price.spare_bytes) & (seconds + price.seconds_per_byte * held <= floor + price.slack)
    left, right = np.nonzero(fit)
    found = _Points(a.first[left], b.last[right], held[left, right], seconds[left, right], left, right)
    return _pruned(found, floor, floor_bytes, (a, b))


def entered(run: Frontier, transitions: np.ndarray) -> Frontier:
    """`run` with the `transitions[x]` seconds added that its first unit's layout x costs; impossible ways are left
    out.
    """
    seconds = run.seconds + transitions[run.first]
    kept = np.nonzero(np.isfinite(seconds))[0]
    left, right = run.sources
    columns = (run.first[kept], run.last[kept], run.held_bytes[kept], seconds[kept])
    return Frontier(*columns, run.floor, run.floor_bytes, run.parts, (left[kept], right[kept]))


@dataclass(frozen=True, eq=False)
class _Points:
    first: np.ndarray
    last: np.ndarray
    held_bytes: np.ndarray
    seconds: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @cached_property
    def ends(self) -> np.ndarray:
        """One number for each pair of end layouts."""
        return np.asarray(self.first * (1 + int(np.max(self.last, initial=0))) + self.last)


def _pruned(points: _Points, floor: float, floor_bytes: float, parts: tuple[Frontier, Frontier] | None) -> Frontier:
    """Those points that no other with the same ends beats; of equal ones the first."""
    order = np.lexsort((points.seconds, points.held_bytes, points.ends))
    if len(order):
        ends, seconds = points.ends[order], points.seconds[order]
        places = seconds
        if ends[0] != ends[-1]:
            # Places among all seconds are whole numbers, so each pair of ends can have a range of its own.
            places = np.unique(seconds, return_inverse=True)[1] - np.unique(ends, return_inverse=True)[1] * len(order)
        before = np.concatenate(([np.inf], np.minimum.accumulate(places)[:-1]))
        order = order[(places < before) & np.isfinite(seconds)]
    return Frontier(
        points.first[order],
        points.last[order],
        points.held_bytes[order],
        points.seconds[order],
        floor,
        floor_bytes,
        parts,
        (points.left[order], points.right[order]),
    )
