"""What the benchmark prints of predictions beside measurements: errors, ranks, regret, verdicts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accuracy.rows import Case

SMALLEST_SET = 4
"""Choice sets with fewer layouts say nothing about ranking."""


@dataclass(frozen=True)
class Answer:
    """One row with what galv said of it."""

    case: Case
    seconds: float
    peak_bytes: float
    """Of the kind and the stage that the row's source prints."""
    fits: bool

    @property
    def time_ratio(self) -> float | None:
        """Predicted over measured step time; None where the time cannot be judged."""
        measured = self.case.measured_seconds
        if measured is None or self.case.row["status"] != "ok":
            return None
        return self.seconds / measured

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured peak memory, None where nothing was measured."""
        measured = self.case.measured_bytes
        return None if measured is None else self.peak_bytes / measured


def summary(answers: Sequence[Answer], grades: str) -> dict[str, Any]:
    """All figures of a set of rows; None where no row can give one. Times are of rows of `grades` alone."""
    timed = [a for a in answers if a.time_ratio is not None and a.case.row["grade"] in grades]
    weighed = [a for a in answers if a.memory_ratio is not None]
    times = np.array([a.time_ratio for a in timed], dtype=float) - 1
    memories = np.array([a.memory_ratio for a in weighed], dtype=float) - 1
    ranks, regrets = ranking(timed)
    _, sound = ranking(timed, without=suspect_sets(answers))
    verdicts = [a for a in answers if has_verdict(a.case)]
    oom = [a for a in verdicts if a.case.row["status"] == "oom"]
    right = [a.fits == (a.case.row["status"] == "ok") for a in verdicts]
    return {
        "time_rows": len(timed),
        "time_median": _quantile(abs(times), 0.5),
        "time_p90": _quantile(abs(times), 0.9),
        "time_bias": _quantile(times, 0.5),
        "memory_rows": len(weighed),
        "memory_median": _quantile(abs(memories), 0.5),
        "memory_p90": _quantile(abs(memories), 0.9),
        "memory_bias": _quantile(memories, 0.5),
        "spearman": _quantile(np.array(ranks), 0.5),
        "regret_mean": float(np.mean(regrets)) if regrets else None,
        "regret_max": max(regrets, default=None),
        "regret_sound": float(np.mean(sound)) if sound else None,
        "choice_sets": len(regrets),
        "verdict_rows": len(verdicts),
        "verdict_accuracy": float(np.mean(right)) if right else None,
        "missed_oom": sum(a.fits for a in oom) / len(oom) if oom else None,
    }


def has_verdict(case: Case) -> bool:
    """Whether the row says something about fitting: it failed, or its source has rows that did."""
    return case.row["status"] == "oom" or case.source == "hagemann2023"


def confusion(answers: Iterable[Answer]) -> dict[tuple[str, str], int]:
    """(measured, predicted) -> rows, both `fits` or `out of memory`."""
    names = {True: "fits", False: "out of memory"}
    table = {(a, b): 0 for a in names.values() for b in names.values()}
    for answer in answers:
        if has_verdict(answer.case):
            table[names[answer.case.row["status"] == "ok"], names[answer.fits]] += 1
    return table


SUSPECT = "SUSPECT TIME"
"""What a row says of itself when its time holds a wait that nothing recorded explains."""


def suspect_sets(answers: Iterable[Answer]) -> set[str]:
    """Choice sets of which half of the rows and more are suspect: what is left of them is a selection by time."""
    marks: dict[str, list[bool]] = {}
    for answer in answers:
        marks.setdefault(answer.case.row["choice_set"], []).append(SUSPECT in answer.case.assumptions)
    return {name for name, marked in marks.items() if 2 * sum(marked) >= len(marked)}


def ranking(timed: Iterable[Answer], without: Container[str] = ()) -> tuple[list[float], list[float]]:
    """(Spearman's rank correlation, regret) of every choice set large enough, but for those named in `without`.

    Regret is the measured time of the layout that is predicted to be fastest over the best measured one, less 1.
    """
    sets: dict[str, list[Answer]] = {}
    for answer in timed:
        if answer.case.row["choice_set"] and answer.case.row["choice_set"] not in without:
            sets.setdefault(answer.case.row["choice_set"], []).append(answer)
    ranks, regrets = [], []
    for answers in sets.values():
        if len(answers) < SMALLEST_SET:
            continue
        measured = np.array([float(a.case.row["step_seconds"]) for a in answers])
        predicted = np.array([a.seconds for a in answers])
        ranks.append(spearman(measured, predicted))
        regrets.append(float(measured[predicted.argmin()] / measured.min() - 1))
    return [rank for rank in ranks if np.isfinite(rank)], regrets


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks, ties sharing theirs; nan where one is constant."""
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    smaller = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    ranks: np.ndarray = smaller + (equal - 1) / 2
    return ranks


def _quantile(values: np.ndarray, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
