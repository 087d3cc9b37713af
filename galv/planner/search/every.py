"""All cuts and all choices of a small pipeline, by branch and bound: what closes the gap that bounds leave.

A chunk's menu holds the ways to run its units that no other way beats in every number that counts: bytes held and
working, each part of its seconds, with the same layouts at both ends. A step takes no less when a part takes longer,
so an optimum is made of such ways. They are chosen chunk by chunk; a branch ends where the step would be no better
than the best found even if all later chunks had the least of each number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from galv.cost_models.estimate import StageSeconds
from galv.planner.search.assign import stage_choice
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Solution
from galv.planner.search.table import CostTable, Option, StageChoice

_TOLERANCE = 1e-12


def best_of_every_cut(table: CostTable, shape: Shape, goal_seconds: float) -> Solution | None:
    """The best plan of `table` that takes less than `goal_seconds`; None when there is none."""
    size = len(table.chain)
    cuts = [(0, *inner, size) for inner in combinations(range(1, size), shape.num_chunks - 1)]
    return best_of_cuts(table, shape, cuts, goal_seconds)


def best_of_cuts(
    table: CostTable, shape: Shape, cuts: Sequence[tuple[int, ...]], goal_seconds: float
) -> Solution | None:
    """The best plan over some cuts that takes less than `goal_seconds`; None when there is none."""
    branches, best = _Branches(table, shape), None
    bounds = sorted((branches.bound_seconds(cut), cut) for cut in cuts)
    for bound, cut in bounds:
        if bound >= goal_seconds * (1 - _TOLERANCE):
            break
        found = branches.best(cut, goal_seconds)
        if found is not None:
            best, goal_seconds = found, found.step_seconds
    return best


@dataclass(frozen=True, eq=False)
class _Menu:
    """Ways to run the units of one chunk on a rank."""

    sequences: list[tuple[Option, ...]]
    numbers: np.ndarray
    """(ways, numbers): forward, input and weight parts of backward, once a step, held, working."""

    @cached_property
    def least(self) -> np.ndarray:
        """The least of each number."""
        return np.asarray(self.numbers.min(axis=0))


@dataclass(frozen=True)
class _Placed:
    """Ways chosen for the first chunks."""

    ways: tuple[tuple[Option, ...], ...]
    numbers: tuple[np.ndarray, ...]


class _Branches:
    """The search over the cuts of one table, with its menus remembered."""

    def __init__(self, table: CostTable, shape: Shape) -> None:
        self.table, self.shape = table, shape
        self._menus: dict[tuple[tuple[str, ...], int], _Menu] = {}

    def bound_seconds(self, cut: tuple[int, ...]) -> float:
        """A bound on all plans of a cut; infinite when a chunk cannot be run at all."""
        menus = self._menus_of(cut)
        return self._step_seconds([menu.least for menu in menus]) if all(m.sequences for m in menus) else np.inf

    def best(self, cut: tuple[int, ...], goal_seconds: float) -> Solution | None:
        """The best plan of a cut that takes less than `goal_seconds`."""
        menus, best = self._menus_of(cut), None
        pending = [_Placed((), ())]
        while pending:
            placed = pending.pop()
            if self._at_least(placed, menus) >= goal_seconds * (1 - _TOLERANCE):
                continue
            if len(placed.ways) == len(menus):
                best = placed
                goal_seconds = self._step_seconds(placed.numbers)
                continue
            more = list(self._extended(placed, menus[len(placed.ways)]))
            more.sort(key=lambda one: -float(one.numbers[-1][:4].sum()))
            pending += more
        return None if best is None else self._solution(cut, best)

    def _at_least(self, placed: _Placed, menus: Sequence[_Menu]) -> float:
        numbers = [*placed.numbers, *(menu.least for menu in menus[len(placed.ways) :])]
        return self._step_seconds(numbers) if self._fits(numbers) else np.inf

    def _step_seconds(self, numbers: Sequence[np.ndarray]) -> float:
        return self.shape.step_seconds(
            [StageSeconds(f, i + w, e, w) for f, i, w, e, _, _ in map(np.ndarray.tolist, numbers)]
        )

    def _fits(self, numbers: Sequence[np.ndarray]) -> bool:
        """Whether all ranks hold no more than they may."""
        for rank in range(self.shape.num_ranks):
            mine = [numbers[chunk] for chunk in self.shape.chunks(rank)]
            if sum(n[4] for n in mine) + max(n[5] for n in mine) > self.table.usable_bytes * (1 + _TOLERANCE):
                return False
        return True

    def _extended(self, placed: _Placed, menu: _Menu) -> Iterator[_Placed]:
        """With each way to run the next chunk; its first unit pays for a layout that differs from the last one's."""
        entry = placed.ways[-1][-1].layout if placed.ways else None
        for sequence, numbers in zip(menu.sequences, menu.numbers, strict=True):
            change = _change(self.table, entry, sequence[0].layout)
            if change is not None:
                paid = numbers + np.array([*change, 0.0, 0.0, 0.0, 0.0])
                yield _Placed((*placed.ways, sequence), (*placed.numbers, paid))

    def _solution(self, cut: tuple[int, ...], placed: _Placed) -> Solution:
        stages: list[StageChoice] = []
        entry: int | None = None
        for chunk, (way, (start, stop)) in enumerate(zip(placed.ways, pairwise(cut), strict=True)):
            units = list(zip(self.table.chain[start:stop], way, strict=True))
            in_flight = self.shape.in_flight(self.shape.rank(chunk))
            stages.append(stage_choice(units, in_flight, transitions=self.table.transitions, entry=entry))
            entry = way[-1].layout
        return Solution(cut, tuple(stages), self.shape.step_seconds([stage.busy for stage in stages]))

    # -- menus

    def _menus_of(self, cut: tuple[int, ...]) -> list[_Menu]:
        names = [self.table.chain[start:stop] for start, stop in pairwise(cut)]
        return [self._menu(mine, self.shape.rank(chunk)) for chunk, mine in enumerate(names)]

    def _menu(self, names: tuple[str, ...], rank: int) -> _Menu:
        if (names, rank) not in self._menus:
            unit = self._unit(names[-1], rank)
            self._menus[names, rank] = unit if len(names) == 1 else self._joined(self._menu(names[:-1], rank), unit)
        return self._menus[names, rank]

    def _unit(self, name: str, rank: int) -> _Menu:
        options = self.table.options[name]
        in_flight = self.shape.in_flight(rank)
        return _undominated(
            [(option,) for option in options],
            [
                (
                    o.forward_seconds,
                    o.backward_seconds - o.weight_seconds,
                    o.weight_seconds,
                    o.step_seconds,
                    o.held_bytes(in_flight),
                    o.working_bytes,
                )
                for o in options
            ],
            self.table.usable_bytes,
        )

    def _joined(self, menu: _Menu, unit: _Menu) -> _Menu:
        sequences, rows = [], []
        for a, x in zip(menu.sequences, menu.numbers, strict=True):
            for b, y in zip(unit.sequences, unit.numbers, strict=True):
                change = _change(self.table, a[-1].layout, b[0].layout)
                if change is not None:
                    row = x + y + np.array([*change, 0.0, 0.0, 0.0, 0.0])
                    row[5] = max(x[5], y[5])
                    sequences.append(a + b)
                    rows.append(row)
        return _undominated(sequences, rows, self.table.usable_bytes)


def _change(table: CostTable, before: int | None, after: int) -> tuple[float, float] | None:
    """(forward, backward) seconds from layout to layout; None where they cannot stand next to each other."""
    return (0.0, 0.0) if before in (None, after) else table.transitions.get((before, after))


def _undominated(sequences: list[tuple[Option, ...]], rows: Sequence[Sequence[float]], usable_bytes: float) -> _Menu:
    """The ways that fit and that no other with the same layouts at its ends beats or equals in every number."""
    numbers = np.array(rows).reshape(-1, 6)
    fit = np.nonzero(numbers[:, 4] + numbers[:, 5] <= usable_bytes * (1 + _TOLERANCE))[0]
    order = fit[np.lexsort(numbers[fit].T[::-1])]
    ends = [(sequence[0].layout, sequence[-1].layout) for sequence in sequences]
    kept: list[int] = []
    for i in order:
        mine = [k for k in kept if ends[k] == ends[i]]
        if not mine or not np.any(np.all(numbers[mine] <= numbers[i], axis=1)):
            kept.append(int(i))
    return _Menu([sequences[k] for k in kept], numbers[kept])
