"""What every walk over one table keeps: the best solution so far, what a better one must beat, and when to stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from galv.planner.search.assign import Assigner
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Clock, Found, Solution
from galv.planner.search.table import CostTable

TOLERANCE = 1e-9
"""Relative rounding of sums of seconds."""


@dataclass(eq=False)
class Walk(ABC):
    """The walk over one table. Solutions slower than `incumbent_seconds` are not looked for."""

    table: CostTable
    shape: Shape
    incumbent_seconds: float
    tolerance: float
    clock: Clock
    best: Solution | None = None

    @abstractmethod
    def solve(self) -> Found:
        """The best solution that beats the incumbent, if any, and a bound on all that are walked over."""

    @cached_property
    def assigner(self) -> Assigner:
        return Assigner.of(self.table)

    @property
    def goal_seconds(self) -> float:
        """What a cut has to stay below to be looked for."""
        least = self.incumbent_seconds if self.best is None else min(self.incumbent_seconds, self.best.step_seconds)
        return least * (1 - max(self.tolerance, TOLERANCE))

    @property
    def is_over(self) -> bool:
        """Whether the time is up; it is not before there is a plan at all."""
        return self.clock.is_over and bool(np.isfinite(self.goal_seconds))
