"""The best plan of one outer choice: where to cut the chain, what each stage does, and a lower bound as proof.

The step time of a cut is the simulated schedule over its stages plus the slowest stage's once-a-step work. A stage's
options matter to no other stage, so each stage takes its fastest choice that fits (`assign.fastest`); what remains is
the cut. `_Cutter` walks over the slowest stage's time theta, from the least possible upwards:

* candidates at theta: the cuts of least weighted sum among those whose every stage takes at most theta, each simulated;
* bound above theta: every cut whose slowest stage k takes more than theta has a critical path through k. The least
  length of that path over all such cuts is again a cut of least weighted sum (weights in `_paths`).

The walk ends when the bound reaches the best simulated time. Where it leaves a gap and the cuts are few, all of them
are looked at; what is open then is reported as `bound_seconds`. With one stage there is nothing to cut: the answer is
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import numpy as np

from galv.cost_models.estimate import StageSeconds, pipeline_seconds
from galv.cost_models.pipeline import num_in_flight
from galv.planner.partition import Counts, least_maximum, least_sum, segments, stage_mask
from galv.planner.search.assign import fastest, smallest_bytes
from galv.planner.search.relax import relaxed_bound_seconds
from galv.planner.search.table import CostTable, Option, StageChoice, Weights

MAX_THRESHOLDS = 24
_TOLERANCE = 1e-9
MAX_CUTS = 2000
"""So many cuts are all looked at, where the bounds leave a gap."""
_PARTS: tuple[Weights, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


@dataclass(frozen=True)
class Solution:
    """The best cut found and its stages. `bound_seconds` is a lower bound on every plan of the same table."""

    cut: tuple[int, ...]
    stages: tuple[StageChoice, ...]
    step_seconds: float
    bound_seconds: float


def step_seconds(table: CostTable, stages: tuple[StageChoice, ...]) -> float:
    """The objective: simulated makespan of the schedule plus the longest once-a-step work."""
    busy = [stage.busy for stage in stages]
    return pipeline_seconds(table.schedule, busy, table.num_microbatches, table.transfer_seconds)


def lower_bound_seconds(table: CostTable) -> float:
    """A cheap bound on every plan of `table`: whole numbers and cuts relaxed, or its longest unit alone."""
    longest = max(_least_steady(table.options[name]) for name in set(table.chain))
    return max(relaxed_bound_seconds(table), table.num_microbatches * longest)


def solve(table: CostTable, *, incumbent_seconds: float = np.inf) -> Solution | None:
    """The best plan of `table`; None when nothing fits, or nothing can beat `incumbent_seconds`."""
    return _Cutter(table, incumbent_seconds).solve()


def least_usable_bytes(table: CostTable) -> tuple[float, tuple[int, ...]]:
    """The least usable bytes per device under which some plan of `table` fits, and that plan's cut."""
    cutter = _Cutter(table, np.inf)
    bytes_of = [cutter.matrix(stage, cutter.least_bytes) for stage in range(table.num_stages)]
    return least_maximum(bytes_of)


def _least_steady(options: tuple[Option, ...]) -> float:
    return min(option.forward_seconds + option.backward_seconds for option in options)


@dataclass(frozen=True)
class _Path:
    """A chain of work that the schedule cannot shorten: how often it visits each stage, and its transfers."""

    visits: list[int]
    num_transfers: int


class _Cutter:
    """The walk over one table, with its stage choices remembered."""

    def __init__(self, table: CostTable, incumbent_seconds: float) -> None:
        self.table = table
        self.incumbent_seconds = incumbent_seconds
        self.in_flight = [
            num_in_flight(table.schedule, stage, table.num_stages, table.num_microbatches)
            for stage in range(table.num_stages)
        ]
        self._choices: dict[tuple[Counts, int, Weights], StageChoice | None] = {}
        self._matrices: dict[tuple[int, Weights], np.ndarray] = {}

    # -- one stage

    def choice(self, stage: int, counts: Counts, weights: Weights | None = None) -> StageChoice | None:
        """The fastest way to run units `counts` as `stage` by `weights`, by default of a whole step."""
        rounds = float(self.table.num_microbatches)
        key = (counts, self.in_flight[stage], weights or (rounds, rounds, 1.0))
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def _choose(self, counts: Counts, in_flight: int, weights: Weights) -> StageChoice | None:
        table = self.table
        least = sum(n * _least_steady(table.options[name]) for name, n in counts)
        if least * table.num_microbatches >= self.incumbent_seconds:
            return None
        if smallest_bytes(counts, table.options, in_flight=in_flight) > table.usable_bytes:
            return None
        return fastest(counts, table.options, in_flight=in_flight, weights=weights, usable_bytes=table.usable_bytes)

    def least_bytes(self, stage: int, counts: Counts) -> float:
        return smallest_bytes(counts, self.table.options, in_flight=self.in_flight[stage])

    def _busy(self, stage: int, counts: Counts, weights: Weights) -> float:
        """Least weighted seconds of a stage; infinite where nothing fits."""
        choice = self.choice(stage, counts, weights)
        return np.inf if choice is None else choice.busy.weighted(weights)

    def matrix(self, stage: int, cost: Callable[[int, Counts], float]) -> np.ndarray:
        """The cost matrix of one stage; segments that hold the same units share one evaluation."""
        known = segments(self.table.chain)
        mask = stage_mask(stage, self.table.num_stages, len(self.table.chain))
        values = np.full(len(known.counts), np.inf)
        for i in np.unique(known.ids[mask]):
            values[i] = cost(stage, known.counts[i])
        return np.where(mask, values[known.ids], np.inf)

    @cached_property
    def seconds(self) -> list[np.ndarray]:
        """Each stage's busy time in a step."""
        return [self.through(stage, self.table.num_microbatches) for stage in range(self.table.num_stages)]

    def steady(self, stage: int, visits: int) -> np.ndarray:
        """Least seconds of `visits` microbatches on a stage, the step's end left out."""
        if not visits:
            return np.zeros_like(self.seconds[stage])
        return visits * self._remembered(stage, (1.0, 1.0, 0.0))

    def through(self, stage: int, visits: int) -> np.ndarray:
        """Least seconds of `visits` microbatches and the step's end on a stage."""
        return self._remembered(stage, (float(visits), float(visits), 1.0))

    def _remembered(self, stage: int, weights: Weights) -> np.ndarray:
        key = (stage, weights)
        if key not in self._matrices:
            self._matrices[key] = self.matrix(stage, lambda s, c: self._busy(s, c, weights))
        return self._matrices[key]

    # -- all stages

    def solve(self) -> Solution | None:
        if self.table.num_stages == 1:
            return self._single()
        least, cut = least_maximum(self.seconds)
        first = self._evaluated(cut) if np.isfinite(least) else None
        if first is None:
            return None
        found = self._walk(least, first)
        is_closed = found.bound_seconds >= found.step_seconds * (1 - _TOLERANCE)
        few = comb(len(self.table.chain) - 1, self.table.num_stages - 1) <= MAX_CUTS
        return self._every_cut(found) if few and not is_closed else found

    def _single(self) -> Solution | None:
        cut = (0, len(self.table.chain))
        choice = self.choice(0, self._counts(*cut))
        if choice is None:
            return None
        seconds = step_seconds(self.table, (choice,))
        return Solution(cut, (choice,), seconds, seconds)

    def _walk(self, least: float, best: Solution) -> Solution:
        bound, below = np.inf, least * (1 - _TOLERANCE)
        for theta in self._thresholds(least, best.step_seconds):
            at, cuts = self._bound(below, theta)
            bound, below = min(bound, at), theta
            for cut in {*cuts, least_sum([np.where(m <= theta, m, np.inf) for m in self.seconds])[1]}:
                found = self._evaluated(cut)
                best = min(best, found, key=lambda s: s.step_seconds) if found else best
            above, _ = self._bound(theta, np.inf)
            if above >= best.step_seconds * (1 - _TOLERANCE):
                break
        else:
            bound = min(bound, above)
        return Solution(best.cut, best.stages, best.step_seconds, min(bound, best.step_seconds))

    def _every_cut(self, best: Solution) -> Solution:
        """The best over all cuts. Each is bounded by its stages' least forward, backward and step's end, each alone."""
        bound, num_units = np.inf, len(self.table.chain)
        for inner in combinations(range(1, num_units), self.table.num_stages - 1):
            cut = (0, *inner, num_units)
            found = self._evaluated(cut)
            if found is not None:
                best = min(best, found, key=lambda s: s.step_seconds)
                bound = min(bound, self._cut_bound(cut))
        return Solution(best.cut, best.stages, best.step_seconds, min(bound, best.step_seconds))

    def _cut_bound(self, cut: tuple[int, ...]) -> float:
        least = []
        for stage, ends in enumerate(pairwise(cut)):
            parts = [self._busy(stage, self._counts(*ends), weights) for weights in _PARTS]
            least.append(StageSeconds(*parts))
        return pipeline_seconds(self.table.schedule, least, self.table.num_microbatches, self.table.transfer_seconds)

    def _thresholds(self, least: float, most: float) -> list[float]:
        """Times of a slowest stage from the `least` possible to `most`, a whole step; at most MAX_THRESHOLDS."""
        values = np.unique(np.concatenate([m[np.isfinite(m)] for m in self.seconds]))
        values = values[(values >= least * (1 - _TOLERANCE)) & (values <= most)]
        picked = np.unique(np.linspace(0, len(values) - 1, MAX_THRESHOLDS).round().astype(int))
        return [float(value) * (1 + _TOLERANCE) for value in values[picked]]

    def _evaluated(self, cut: tuple[int, ...]) -> Solution | None:
        if any(start >= stop for start, stop in pairwise(cut)):
            return None
        choices = [self.choice(stage, self._counts(*ends)) for stage, ends in enumerate(pairwise(cut))]
        if any(choice is None for choice in choices):
            return None
        stages = tuple(choice for choice in choices if choice is not None)
        return Solution(cut, stages, step_seconds(self.table, stages), 0.0)

    def _counts(self, start: int, stop: int) -> Counts:
        known = segments(self.table.chain)
        return known.counts[known.ids[start, stop]]

    # -- bounds

    def _bound(self, below: float, theta: float) -> tuple[float, list[tuple[int, ...]]]:
        """The least critical path over all cuts whose slowest stage takes more than `below`, at most `theta`."""
        results = [self._bound_through(k, below, theta) for k in range(self.table.num_stages)]
        return min(value for value, _ in results), [cut for value, cut in results if np.isfinite(value)]

    def _bound_through(self, slowest: int, below: float, theta: float) -> tuple[float, tuple[int, ...]]:
        """The greatest of the bounds that the families of paths give for cuts whose slowest stage is `slowest`."""
        paths = [self._least_path(path, slowest, below, theta) for path in self._paths(slowest)]
        return max(paths, key=lambda path: path[0])

    def _least_path(self, path: _Path, slowest: int, below: float, theta: float) -> tuple[float, tuple[int, ...]]:
        costs = []
        for stage, (visits, seconds) in enumerate(zip(path.visits, self.seconds, strict=True)):
            allowed = seconds <= theta
            if stage == slowest:
                allowed &= seconds > below
            on_path = self.through(stage, visits) if stage == slowest else self.steady(stage, visits)
            costs.append(np.where(allowed, on_path, np.inf))
        value, cut = least_sum(costs)
        return value + path.num_transfers * self.table.transfer_seconds, cut

    def _paths(self, k: int) -> list[_Path]:
        """Critical paths of the schedule when stage k is the slowest, m microbatches, w in flight at k.

        GPipe: the first microbatch reaches k, k works through all, the last goes on: every stage once, k m times.
        1F1B, w < m: the first microbatch travels to the end and back to k; k works until it has sent the last one
        forward; that travels to the end and all the way back: stages after k twice, k m - w + 1 times. Where transfers
        are slow, a path between k and a neighbour is longer (`_pair`).
        1F1B, w >= m: stage k's forwards follow each other, and so do its backwards. The longer half of the two, with
        one microbatch going through all stages around it, is at least (m - 1) / 2 visits of k more than one each.
        Also, the last stage has one microbatch in flight and so works through all m between the first's way there and
        the last's way back; and whatever the schedule, k is reached and does all its work.
        """
        stages, rounds = self.table.num_stages, self.table.num_microbatches
        before, after = k, stages - 1 - k
        if self.table.schedule == "gpipe":
            return [_Path([rounds if j == k else 1 for j in range(stages)], 2 * (stages - 1))]
        if self.in_flight[k] < rounds or not after:
            own = rounds - self.in_flight[k] + 1
            alone = _Path([1] * before + [own] + [2] * after, 2 * before + 4 * after)
            return [alone, *(self._pair(j) for j in (k - 1, k) if 0 <= j < stages - 1 and self.in_flight[j] < rounds)]
        return [
            _Path([1] * before + [1 + (rounds - 1) // 2] + [1] * after, 2 * (stages - 1)),
            _Path([1] * (stages - 1) + [rounds], 2 * (stages - 1)),
            _Path([1] * before + [rounds] + [0] * after, 2 * before),
        ]

    def _pair(self, j: int) -> _Path:
        """The path under 1F1B that goes to and fro between stages j and j + 1 while j has microbatches to send.

        j's forward of one round feeds j + 1's of the next; what j + 1 does after it is the backward that j waits for in
        the round after that. So two rounds cost both stages' work once and two transfers. An odd round is j's own.
        """
        after = self.table.num_stages - 1 - j
        pairs, odd = divmod(self.table.num_microbatches - self.in_flight[j] - 1, 2)
        visits = [1] * j + [2 + pairs + odd, 2 + pairs] + [2] * (after - 1)
        return _Path(visits, 2 * j + 4 * after + 2 * pairs)
