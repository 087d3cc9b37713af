"""What a search of one table found, and how long it may go on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from galv.planner.search.table import StageChoice


@dataclass(frozen=True)
class Solution:
    """A cut and what its chunks do."""

    cut: tuple[int, ...]
    """Positions 0 = c0 < c1 < ... = number of units."""
    stages: tuple[StageChoice, ...]
    """One for each chunk, in the order of the model."""
    step_seconds: float


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
