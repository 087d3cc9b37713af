"""Pipelines of several chunks a rank: chunks of even seconds, then better ones nearby; the bound spreads the ranks'
work.

A rank's chunks share its memory. For one cut, the rank's options are chosen together, as those of one stage with the
units of all its chunks, and units that take the same option are spread evenly over the chunks. Cuts are sought by
moving single units between chunks, as long as that makes the step shorter.

The bound is on the slowest rank: whatever the cut, some rank's own work is at least the relaxed work of all ranks by
their number (`relax`), and where a model is one row of equal blocks with one unit at either end, at least the best
share of blocks, found exactly, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from galv.planner.partition import Counts, least_maximum, least_sum
from galv.planner.search.assign import Assigner, stage_choice
from galv.planner.search.relax import relaxed_bound_seconds
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Clock, Found, Solution, better
from galv.planner.search.table import CostTable, Option, StageChoice

_TOLERANCE = 1e-9


@dataclass(eq=False)
class Loops:
    """The walk over one table. Solutions slower than `incumbent_seconds` are not looked for."""

    table: CostTable
    shape: Shape
    incumbent_seconds: float
    tolerance: float
    clock: Clock
    best: Solution | None = None
    _ranks: dict[tuple[int, Counts], tuple[tuple[str, Option], ...] | None] = field(default_factory=dict)
    _work: dict[tuple[float, Counts], float] = field(default_factory=dict)
    _tried: set[tuple[int, ...]] = field(default_factory=set)

    @cached_property
    def assigner(self) -> Assigner:
        return Assigner.of(self.table)

    @property
    def goal_seconds(self) -> float:
        """What a cut has to stay below to be looked for."""
        least = self.incumbent_seconds if self.best is None else min(self.incumbent_seconds, self.best.step_seconds)
        return least * (1 - max(self.tolerance, _TOLERANCE))

    def solve(self) -> Found:
        """The best cut found that beats the incumbent, if any, and a bound on all."""
        bound = relaxed_bound_seconds(self.table)
        if bound < self.goal_seconds:
            bound = max(bound, self._least_share_seconds())
        if bound < self.goal_seconds:
            self._descend(self._even())
        return Found(self.best, min(bound, self.goal_seconds))

    # -- cuts

    def _even(self) -> tuple[int, ...]:
        """The cut whose slowest chunk is fastest, memory ignored."""
        each = np.array([min(o.seconds(1) for o in self.table.options[name]) for name in self.table.chain])
        upto = np.concatenate(([0.0], np.cumsum(each)))
        size = len(upto)
        costs = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], upto[None, :] - upto[:, None], np.inf)
        all_costs = [costs] * self.shape.num_chunks
        # Of cuts with the same slowest chunk, the one of least squares is the most even.
        top, _ = least_maximum(all_costs)
        squares = [np.where(cost <= top * (1 + _TOLERANCE), cost * cost, np.inf) for cost in all_costs]
        return least_sum(squares)[1]

    def _descend(self, cut: tuple[int, ...]) -> None:
        """From `cut`, as long as moving a unit over borders helps."""
        here = self._evaluated(cut)
        if here is not None and here.step_seconds < self.incumbent_seconds:
            self.best = better(self.best, here)
        improved = True
        while improved and not self.clock.is_over:
            improved = False
            for other in self._neighbours(cut):
                if other in self._tried or self.clock.is_over:
                    continue
                found = self._evaluated(other)
                if found is not None and (here is None or found.step_seconds < here.step_seconds * (1 - _TOLERANCE)):
                    cut, here, improved = other, found, True
                    break
            if here is not None and here.step_seconds < self.incumbent_seconds:
                self.best = better(self.best, here)

    def _neighbours(self, cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Cuts in which one chunk gives a unit to another: all borders between them move by one."""
        chunks = self.shape.num_chunks
        order = sorted(range(chunks), key=lambda c: cut[c] - cut[c + 1])
        for giver in order[:_GIVERS]:
            for taker in range(chunks):
                step = 1 if taker < giver else -1
                borders = range(taker + 1, giver + 1) if taker < giver else range(giver + 1, taker + 1)
                other = tuple(place + step if b in borders else place for b, place in enumerate(cut))
                if giver != taker and all(a < b for a, b in pairwise(other)):
                    yield other

    def _evaluated(self, cut: tuple[int, ...]) -> Solution | None:
        self._tried.add(cut)
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

    def _least_share_seconds(self) -> float:
        """A bound on the slowest rank's work over all ways to share out the blocks; 0 for models of another form."""
        chain = self.table.chain
        blocks = max(((name, len(list(run))) for name, run in groupby(chain)), key=lambda run: run[1])
        head = None if chain[0] == blocks[0] else chain[0]
        tail = None if chain[-1] == blocks[0] else chain[-1]
        if blocks[1] + (head is not None) + (tail is not None) != len(chain):
            return 0.0
        size = blocks[1] + 1
        reach = np.where(np.arange(size) == 0, 0.0, np.inf)
        for rank in range(self.shape.num_ranks):
            chunks = self.shape.chunks(rank)
            extra = [head] * (0 in chunks) + [tail] * (self.shape.num_chunks - 1 in chunks)
            fixed = tuple((name, 1) for name in extra if name is not None)
            values = np.full(size, np.inf)
            for number in range(max(0, self.shape.virtual_stages - len(fixed)), size):
                values[number] = self._rank_work(rank, (*fixed, (blocks[0], number)) if number else fixed)
                if values[number] >= self.goal_seconds:
                    values[number] = np.inf
                    break
            through = np.maximum(reach[:, None], np.array([np.roll(values, k) for k in range(size)]))
            reach = np.min(np.where(np.arange(size)[:, None] <= np.arange(size)[None, :], through, np.inf), axis=0)
        return float(min(reach[-1], self.goal_seconds))

    def _rank_work(self, rank: int, units: Counts) -> float:
        """A bound on the time at which a rank that holds `units` has done its work of a step."""
        key = self.shape.in_flight(rank), units
        if key not in self._work:
            self._work[key] = self.assigner.relaxed_seconds(
                units, in_flight=key[0], weights=self.shape.busy, usable_bytes=self.table.usable_bytes
            )
        return self._work[key] + self.shape.least_wait_seconds(self.shape.chunks(rank)[0], self._least_forward)

    @cached_property
    def _least_forward(self) -> float:
        return min(option.forward_seconds for options in self.table.options.values() for option in options)


_GIVERS = 4


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
