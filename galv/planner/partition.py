"""Cuts a chain of units into consecutive stages: two dynamic programs over (stage, position), exact.

A cost matrix `costs[s][i, j]` is what stage s pays for holding units i..j-1, infinite where that cannot be. Stages are
never empty. O(stages x units^2), vectorized over the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Counts = tuple[tuple[str, int], ...]
"""Unit classes and how many units of each."""
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


def least_sum(costs: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
    """The least total cost over all cuts, and the cut as positions 0 = c0 < c1 < ... = number of units."""
    return _cut(costs, np.add)


def least_maximum(costs: Sequence[np.ndarray]) -> tuple[float, tuple[int, ...]]:
    """The least largest stage cost over all cuts, and the cut."""
    return _cut(costs, np.maximum)


def _cut(costs: Sequence[np.ndarray], combine: Combine) -> tuple[float, tuple[int, ...]]:
    num_units = costs[0].shape[0] - 1
    reach = costs[0][0]
    came_from = []
    for matrix in costs[1:]:
        through = combine(reach[:, None], matrix)
        came_from.append(np.argmin(through, axis=0))
        reach = np.min(through, axis=0)
    cut = [num_units]
    for origin in reversed(came_from):
        cut.append(int(origin[cut[-1]]))
    cut.append(0)
    return float(reach[num_units]), tuple(reversed(cut))


@lru_cache(maxsize=1024)
def stage_mask(stage: int, num_stages: int, num_units: int) -> np.ndarray:
    """Which segments [i, j] stage `stage` can hold so that every other stage still gets a unit."""
    later = num_stages - 1 - stage
    starts = np.arange(num_units + 1)[:, None]
    stops = np.arange(num_units + 1)[None, :]
    first = starts >= stage if stage else starts == 0
    last = stops <= num_units - later if later else stops == num_units
    return np.asarray(first & last & (starts < stops))


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of a chain, told apart only by how many units of each class they hold."""

    ids: np.ndarray
    """`ids[i, j]` is the position in `counts` of what `chain[i:j]` holds."""
    counts: tuple[Counts, ...]


@lru_cache(maxsize=64)
def segments(chain: tuple[str, ...]) -> Segments:
    """The segments of `chain`, the unit class at each position; counts list classes in order of first appearance."""
    size = len(chain) + 1
    ids = np.zeros((size, size), dtype=np.int64)
    known: dict[Counts, int] = {}
    for start in range(size - 1):
        held: dict[str, int] = {}
        for stop in range(start + 1, size):
            name = chain[stop - 1]
            held[name] = held.get(name, 0) + 1
            ids[start, stop] = known.setdefault(tuple(held.items()), len(known))
    return Segments(ids, tuple(known))
