"""How samples of one duration are taken, and what they are worth. No torch here: clocks and works are given."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import ceil

Clock = Callable[[], float]

MAX_REPEATS = 2000


def repeats_for(seconds: float, least_seconds: float) -> int:
    """How often work of `seconds` is to be repeated in one sample, so that the clock's own grain does not matter."""
    return min(MAX_REPEATS, max(1, ceil(least_seconds / max(seconds, 1e-9))))


def timed(work: Callable[[], None], synchronize: Callable[[], None], clock: Clock, repeats: int) -> float:
    """Seconds of one of `repeats` runs of `work`, the device idle before and after."""
    synchronize()
    start = clock()
    for _ in range(repeats):
        work()
    synchronize()
    return (clock() - start) / repeats


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median; 0 of one sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / statistics.median(samples)
