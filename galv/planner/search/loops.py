"""Pipelines whose cut is given: of several chunks a rank, or with split backwards. All are cut as evenly as can be.

Such schedules live from ranks that take equally long: the cut is the one whose slowest chunk is fastest, memory
ignored, of these the one of least squares. A rank's chunks share its memory. Its options are chosen together, as
those of one stage with the units of all its chunks, and units that take the same option are spread evenly over them.

The bound is on the slowest rank: it waits for the first microbatch to come up through the chunks below its lowest
one, does its own work, and unless weight parts can fill that time, its last gradient goes down through these chunks.
Nor is a step shorter than with the least of each number in every chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from galv.cost_models.estimate import StageSeconds
from galv.planner.partition import Counts, least_maximum, least_sum
from galv.planner.search.assign import stage_choice
from galv.planner.search.solution import Found, Solution
from galv.planner.search.table import Option, StageChoice
from galv.planner.search.walk import TOLERANCE, Walk
from galv.schedules import SPLIT


@dataclass(eq=False)
class Loops(Walk):
    """The walk over the one cut of a schedule whose cut is given."""

    _ranks: dict[tuple[int, Counts], tuple[tuple[str, Option], ...] | None] = field(default_factory=dict)

    def solve(self) -> Found:
        """The best plan of the even cut that beats the incumbent, if any, and a bound on all plans of that cut."""
        bound = self.floor_seconds(with_memory=False)
        if bound < self.goal_seconds:
            bound = self.floor_seconds(with_memory=True)
        if bound < self.goal_seconds:
            bound = max(bound, self._free_step_seconds())
        if bound < self.goal_seconds and not self.is_over:
            found = self._evaluated(self.cut)
            if found is not None and found.step_seconds < self.incumbent_seconds:
                self.best = found
        return Found(self.best, min(bound, self.goal_seconds))

    # -- the cut

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The cut whose slowest chunk is fastest, memory ignored."""
        each = np.array([min(o.seconds(1) for o in self.table.options[name]) for name in self.table.chain])
        upto = np.concatenate(([0.0], np.cumsum(each)))
        size = len(upto)
        costs = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], upto[None, :] - upto[:, None], np.inf)
        all_costs = [costs] * self.shape.num_chunks
        # Of cuts with the same slowest chunk, the one of least squares is the most even.
        top, _ = least_maximum(all_costs)
        squares = [np.where(cost <= top * (1 + TOLERANCE), cost * cost, np.inf) for cost in all_costs]
        return least_sum(squares)[1]

    def _evaluated(self, cut: tuple[int, ...]) -> Solution | None:
        picked: dict[int, list[Option]] = {}
        for rank in range(self.shape.num_ranks):
            chunks = self.shape.chunks(rank)
            names = [self.table.chain[cut[chunk] : cut[chunk + 1]] for chunk in chunks]
            options = self._rank(rank, names)
            if options is None:
                return None
            picked.update(zip(chunks, options, strict=True))
        stages: list[StageChoice] = []
        entry: int | None = None
        for chunk, (start, stop) in enumerate(pairwise(cut)):
            units = list(zip(self.table.chain[start:stop], picked[chunk], strict=True))
            layouts = [option.layout for option in picked[chunk]]
            pairs = pairwise([layouts[0] if entry is None else entry, *layouts])
            if any(a != b and (a, b) not in self.table.transitions for a, b in pairs):
                return None
            in_flight = self.shape.in_flight(self.shape.rank(chunk))
            stages.append(stage_choice(units, in_flight, transitions=self.table.transitions, entry=entry))
            entry = layouts[-1]
        return Solution(cut, tuple(stages), self.shape.step_seconds([stage.busy for stage in stages]))

    def _rank(self, rank: int, names: Sequence[tuple[str, ...]]) -> list[list[Option]] | None:
        """The options of each chunk of a rank whose chunks hold `names`; None when they do not fit."""
        units = tuple((name, len(list(run))) for mine in names for name, run in groupby(mine))
        key = rank, units
        if key not in self._ranks:
            choice = self.assigner.fastest(
                units,
                in_flight=self.shape.in_flight(rank),
                weights=self.shape.busy,
                usable_bytes=self.table.usable_bytes,
            )
            self._ranks[key] = None if choice is None else tuple(choice.units())
        sequence = self._ranks[key]
        return None if sequence is None else _dealt(sequence, names, in_order=self.assigner.has_layouts)

    # -- the bound

    def floor_seconds(self, *, with_memory: bool) -> float:
        """Seconds that no plan can stay below; infinite when a rank cannot hold its units, where memory counts."""
        split, transfer, cut = self.shape.schedule in SPLIT, self.shape.transfer_seconds, self.cut
        least = {name: _least_trip_seconds(options, split) for name, options in self.table.options.items()}
        floor = wait = 0.0
        # The lowest chunk of rank r is the model's chunk r.
        for rank in range(self.shape.num_ranks):
            chunks = self.shape.chunks(rank)
            names = Counter(name for c in chunks for name in self.table.chain[cut[c] : cut[c + 1]])
            floor = max(floor, wait + (self._work_seconds(rank, names) if with_memory else self._free_seconds(names)))
            wait += sum(least[name] for name in self.table.chain[cut[rank] : cut[rank + 1]])
            wait += transfer if split else 2 * transfer
        return floor

    def _free_step_seconds(self) -> float:
        """The step with every number of every unit at its least: no number makes a step shorter by being larger."""
        least = {name: _least_each(options) for name, options in self.table.options.items()}
        chunks = []
        for start, stop in pairwise(self.cut):
            forward, inputs, weight, step = np.sum(
                [least[name] for name in self.table.chain[start:stop]], axis=0
            ).tolist()
            chunks.append(StageSeconds(forward, inputs + weight, step, weight))
        return self.shape.step_seconds(chunks)

    def _work_seconds(self, rank: int, names: Counter[str]) -> float:
        """The least that a rank has to do, its memory relaxed."""
        return self.assigner.relaxed_seconds(
            tuple(names.items()),
            in_flight=self.shape.in_flight(rank),
            weights=self.shape.busy,
            usable_bytes=self.table.usable_bytes,
        )

    def _free_seconds(self, names: Counter[str]) -> float:
        """The least that a rank has to do, were memory free."""
        options, busy = self.table.options, self.shape.busy
        return sum(number * min(o.weighted(busy) for o in options[name]) for name, number in names.items())


def _least_each(options: Sequence[Option]) -> np.ndarray:
    """The least forward, input part and weight part of backward, and once-a-step seconds of some options."""
    each = [
        (o.forward_seconds, o.backward_seconds - o.weight_seconds, o.weight_seconds, o.step_seconds) for o in options
    ]
    return np.asarray(np.min(each, axis=0))


def _least_trip_seconds(options: Sequence[Option], split: bool) -> float:
    """The least that a unit delays the ranks above it, on the way up and, where backward is not split, down."""
    return min(o.forward_seconds + (0.0 if split else o.backward_seconds) for o in options)


def _dealt(
    sequence: Sequence[tuple[str, Option]], names: Sequence[tuple[str, ...]], *, in_order: bool
) -> list[list[Option]]:
    """The options of a rank's units dealt out to its chunks: in their order, or like options evenly."""
    if in_order:
        in_turn = iter([option for _, option in sequence])
        return [[next(in_turn) for _ in mine] for mine in names]
    queues: dict[str, list[Option]] = {}
    for name, option in sequence:
        queues.setdefault(name, []).append(option)
    dealt: list[dict[str, list[Option]]] = [{name: [] for name in queues} for _ in names]
    for name, options in queues.items():
        # A unit's turn comes at its share of the way through its chunk, so that all chunks are filled at the same pace.
        turns = sorted(
            ((place + 0.5) / mine.count(name), chunk)
            for chunk, mine in enumerate(names)
            for place in range(mine.count(name))
        )
        for (_, chunk), option in zip(turns, options, strict=True):
            dealt[chunk][name].append(option)
    return [[own[name].pop(0) for name in mine] for mine, own in zip(names, dealt, strict=True)]
