"""Least squares over rows: robust, damped Gauss-Newton on the logarithms of constants, drawn to what is expected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from accuracy.constants import FAMILIES, UNKNOWN, Constant, Profiles
from accuracy.questions import Question

TENTH = 0.1
"""Errors beyond this have little say: Cauchy's loss."""


@dataclass
class Fit:
    """One least-squares problem: rows, constants, and how a row's error is found."""

    questions: list[Question]
    constants: list[Constant]
    profiles: Profiles
    error: Callable[[Question, Profiles], float]

    def __post_init__(self) -> None:
        expected = [self.profiles.expected(constant) for constant in self.constants]
        self.known = np.array([value is not None for value in expected])
        self.start = np.log([e or c.kind.start for e, c in zip(expected, self.constants, strict=True)])
        spreads = [c.kind.spread if k else UNKNOWN for c, k in zip(self.constants, self.known, strict=True)]
        self._pull = (TENTH / np.array(spreads)) ** 2
        self.touched = [
            [i for i, q in enumerate(self.questions) if self._concerns(constant, q)] for constant in self.constants
        ]

    def values(self) -> np.ndarray:
        values: np.ndarray = np.log([self.profiles.get(constant) for constant in self.constants])
        return values

    def put(self, values: np.ndarray) -> None:
        for constant, value in zip(self.constants, values, strict=True):
            if abs(self.profiles.get(constant) - np.exp(value)) > 1e-12 * np.exp(value):
                self.profiles.set(constant, float(np.exp(value)))

    def _concerns(self, constant: Constant, question: Question) -> bool:
        kind, owner = constant.owner.split(":")
        if kind == "device":
            return question.case.cluster.device.name in FAMILIES[owner]
        chain = self.profiles.parents(question.case.stack)
        if owner not in chain:
            return False
        nearer = chain[: chain.index(owner)]
        return not any(constant.name in self.profiles.stacks[name] for name in nearer)

    def errors(self, which: Iterable[int] | None = None) -> np.ndarray:
        """Each row's error with the constants as they stand."""
        rows = range(len(self.questions)) if which is None else which
        return np.array([self.error(self.questions[i], self.profiles) for i in rows])

    def jacobian(self, errors: np.ndarray, step: float = 0.02) -> np.ndarray:
        values, found = self.values(), np.zeros((len(self.questions), len(self.constants)))
        for j, constant in enumerate(self.constants):
            room = np.log(constant.kind.highest) - values[j]
            moved = step if room > step else -step
            self.profiles.set(constant, float(np.exp(values[j] + moved)))
            rows = self.touched[j]
            found[rows, j] = (self.errors(rows) - errors[rows]) / moved
            self.profiles.set(constant, float(np.exp(values[j])))
        return found

    def step(self, errors: np.ndarray, slopes: np.ndarray, damping: float, without: np.ndarray | None = None) -> Any:
        """The constants after one damped Gauss-Newton step; rows in `without` do not count.

        Robust as the Cauchy distribution is: rows that are off by tenths, as by stalls that nothing recorded explains,
        have little say. Constants at their limit that would leave it stay there, and the others are found without them.
        """
        weights = 1 / (1 + (errors / TENTH) ** 2)
        if without is not None:
            weights = np.where(without, 0, weights)
        values = self.values()
        pull = np.diag(self._pull)
        normal = slopes.T @ (weights[:, None] * slopes) + pull
        side = -slopes.T @ (weights * errors) - pull @ (values - self.start)
        normal += damping * np.diag(np.diag(normal) + 1e-9)
        lowest = np.log([c.kind.lowest for c in self.constants])
        highest = np.log([c.kind.highest for c in self.constants])
        free = np.ones(len(values), dtype=bool)
        moved = values
        while free.any():
            step = np.linalg.solve(normal[np.ix_(free, free)], side[free])
            moved = values.copy()
            moved[free] += np.clip(step, -0.7, 0.7)
            stuck = free & ((moved > highest) & (values > highest - 1e-3) | (moved < lowest) & (values < lowest + 1e-3))
            if not stuck.any():
                break
            free &= ~stuck
        return np.clip(moved, lowest, highest)

    def cost(self, errors: np.ndarray, values: np.ndarray) -> float:
        cauchy = TENTH**2 / 2 * np.log1p((errors / TENTH) ** 2)
        return float(cauchy.sum() + (self._pull * (values - self.start) ** 2).sum() / 2)

    def run(self, rounds: int, report: Callable[[str], None]) -> None:
        """Least squares until nothing is gained."""
        errors, damping = self.errors(), 0.01
        for round_ in range(rounds):
            slopes, values = self.jacobian(errors), self.values()
            before = self.cost(errors, values)
            for _ in range(5):
                self.put(self.step(errors, slopes, damping))
                moved = self.errors()
                if self.cost(moved, self.values()) < before:
                    break
                self.put(values)
                damping = max(damping * 6, 0.05)
            else:
                break
            errors, damping = moved, damping / 4
            report(f"round {round_}: median {np.median(abs(errors)):.4f} p90 {np.quantile(abs(errors), 0.9):.4f}")
            if self.cost(errors, self.values()) > before * (1 - 1e-3):
                break
