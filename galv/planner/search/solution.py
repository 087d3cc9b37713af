"""What a search of one table found, and how long it may go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from galv.planner.search.table import StageChoice


@dataclass(frozen=True)
class Solution:
    """The best cut found and its chunks. `bound_seconds` is a lower bound on every plan of the same table."""

    cut: tuple[int, ...]
    """Positions 0 = c0 < c1 < ... = number of units."""
    stages: tuple[StageChoice, ...]
    """One for each chunk, in the order of the model."""
    step_seconds: float
    bound_seconds: float

    def bounded(self, bound_seconds: float) -> Solution:
        """The same with a bound, which is no more than its own seconds."""
        return replace(self, bound_seconds=min(bound_seconds, self.step_seconds))


@dataclass(frozen=True)
class Found:
    """The outcome of a walk: the best solution that beats the incumbent, and a bound on all others."""

    best: Solution | None
    bound_seconds: float


def better(a: Solution | None, b: Solution | None) -> Solution | None:
    """The faster of two."""
    both = [one for one in (a, b) if one is not None]
    return min(both, key=lambda one: one.step_seconds, default=None)


@dataclass(frozen=True)
class Clock:
    """When a search has to end, in seconds of `time.perf_counter`."""

    end_seconds: float = float("inf")

    @classmethod
    def limited(cls, seconds: float | None) -> Clock:
        """One that ends in so many seconds; None for never."""
        return cls() if seconds is None else cls(time.perf_counter() + seconds)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() >= self.end_seconds


def peak_bytes_of(stages: Sequence[StageChoice]) -> float:
    """The most that any chunk alone needs."""
    return max(stage.peak_bytes for stage in stages)
