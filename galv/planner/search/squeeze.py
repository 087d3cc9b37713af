"""Bounds on cuts whose cost is the greatest of some sums over stages, one of them plus a maximum over stages.

A cell is a segment of the chain that a stage may hold; it has a trip, a lap and an extra. A chain of work visits
each stage some number of times and so takes a weighted sum of the trips; the first chain visits each once and also
takes the greatest of the extras. For a threshold on the extras the least of each sum is a dynamic program over the
cut. The greatest of those least sums bounds every cut under the threshold, so all thresholds together bound all
cuts; likewise for all cuts with a given cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_THRESHOLDS = 32


@dataclass(frozen=True, eq=False)
class Cells:
    """The segments start..stop-1 that one stage may hold. Arrays run over them."""

    starts: np.ndarray
    stops: np.ndarray
    trips: np.ndarray
    extras: np.ndarray
    laps: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def kept(self, which: np.ndarray) -> Cells:
        """Some of them."""
        return Cells(self.starts[which], self.stops[which], self.trips[which], self.extras[which], self.laps[which])

    @cached_property
    def by_start(self) -> _Groups:
        return _Groups.of(self.starts)

    @cached_property
    def by_stop(self) -> _Groups:
        return _Groups.of(self.stops)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Cells that share a place."""

    order: np.ndarray
    begins: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, places: np.ndarray) -> _Groups:
        order = np.argsort(places, kind="stable")
        found, begins = np.unique(places[order], return_index=True)
        return cls(order, begins, found)

    def least(self, values: np.ndarray, size: int) -> np.ndarray:
        """The least value at each place; the last axis of `values` runs over cells, that of the result over places."""
        found = np.full((*values.shape[:-1], size), np.inf)
        if len(self.order):
            found[..., self.places] = np.minimum.reduceat(values[..., self.order], self.begins, axis=-1)
        return found


@dataclass(frozen=True, eq=False)
class Chains:
    """Chains of work: how often each visits each stage (chains, stages), and what it takes besides (chains)."""

    visits: np.ndarray
    fixed_seconds: np.ndarray

    def more(self, visits: np.ndarray, fixed_seconds: float) -> Chains:
        """These and one more."""
        return Chains(np.vstack([self.visits, visits]), np.append(self.fixed_seconds, fixed_seconds))


@dataclass(frozen=True, eq=False)
class Squeeze:
    """The cells of all stages of a chain of `num_units`, and the chains of work that bound its cuts."""

    stages: Sequence[Cells]
    num_units: int
    chains: Chains

    @cached_property
    def is_empty(self) -> bool:
        """Whether no cut is left."""
        return not all(map(len, self.stages)) or not np.isfinite(self.least_extra)

    @cached_property
    def thresholds(self) -> tuple[np.ndarray, np.ndarray]:
        """Ascending values of the maximum: where cells up to `high` are allowed, the maximum counts at least `low`."""
        values = np.unique(np.concatenate([cells.extras for cells in self.stages]))
        values = values[values >= self.least_extra]
        if len(values) <= MAX_THRESHOLDS:
            return values, values
        edges = np.unique(np.linspace(0, len(values) - 1, MAX_THRESHOLDS).round().astype(int))
        low = np.concatenate((values[:1], values[edges[:-1] + 1]))
        return low, values[edges]

    @cached_property
    def least_extra(self) -> float:
        """The least maximum of any cut; infinite when there is none."""
        reach = self._start(())
        for cells in self.stages:
            reach = cells.by_stop.least(np.maximum(reach[cells.starts], cells.extras), self.num_units + 1)
        return float(reach[-1])

    @cached_property
    def costs(self) -> list[np.ndarray]:
        """For each stage, for each of its cells a bound on every cut that has it."""
        found = [np.full(len(cells), np.inf) for cells in self.stages]
        for low, high in zip(*self.thresholds, strict=True):
            before, after = self._before(high), self._after(high)
            for s, cells in enumerate(self.stages):
                sums = before[s][:, cells.starts] + self._seconds(s, high) + after[s + 1][:, cells.stops]
                sums += self.chains.fixed_seconds[:, None]
                sums[0] += low
                np.minimum(found[s], sums.max(axis=0), out=found[s])
        return found

    @cached_property
    def bound_seconds(self) -> float:
        """A bound on every cut; infinite when there is none."""
        if self.is_empty:
            return np.inf
        return max(float(cost.min()) for cost in self.costs)

    def kept(self, which: Sequence[np.ndarray]) -> Squeeze:
        """Some of the cells of each stage."""
        stages = [cells.kept(mine) for cells, mine in zip(self.stages, which, strict=True)]
        return Squeeze(stages, self.num_units, self.chains)

    def cut(self, high: float, chain: int = 0) -> tuple[tuple[int, ...], np.ndarray, float] | None:
        """The cut that a chain takes least for among those whose extras are at most `high`; its laps, and its bound."""
        after, places, laps, trip, extra = self._after(high), [0], [], 0.0, 0.0
        for s, cells in enumerate(self.stages):
            cost = np.where(cells.starts == places[-1], self._seconds(s, high)[chain], np.inf)
            cost = cost + after[s + 1][chain][cells.stops]
            best = int(np.argmin(cost)) if len(cells) else -1
            if best < 0 or not np.isfinite(cost[best]):
                return None
            places.append(int(cells.stops[best]))
            laps.append(cells.laps[best])
            trip, extra = trip + float(cells.trips[best]), max(extra, float(cells.extras[best]))
        lengths = self.chains.visits @ np.array(laps)
        lengths[0] = trip + extra
        return tuple(places), np.array(laps), float((lengths + self.chains.fixed_seconds).max())

    def cuts(self, most: int) -> list[tuple[int, ...]] | None:
        """All cuts that are left; None when there are more than `most`."""
        found: list[tuple[int, ...]] = [(0,)]
        after = self._after(np.inf)
        for s, cells in enumerate(self.stages):
            leads_on = np.isfinite(after[s + 1][0][cells.stops])
            found = [(*cut, int(stop)) for cut in found for stop in cells.stops[(cells.starts == cut[-1]) & leads_on]]
            if len(found) > most:
                return None
        return found

    def _seconds(self, stage: int, high: float) -> np.ndarray:
        """(chains, cells) seconds that chains spend on a stage, with cells above the threshold left out."""
        cells = self.stages[stage]
        seconds = self.chains.visits[:, stage, None] * np.where(cells.extras <= high, cells.laps, np.inf)
        seconds[0] = np.where(cells.extras <= high, cells.trips, np.inf)
        return seconds

    def _before(self, high: float) -> list[np.ndarray]:
        """The least sums of the first 0, 1, ... stages, (chains, where they stop)."""
        found = [self._start(self.chains.fixed_seconds.shape)]
        for s, cells in enumerate(self.stages):
            through = found[-1][:, cells.starts] + self._seconds(s, high)
            found.append(cells.by_stop.least(through, self.num_units + 1))
        return found

    def _after(self, high: float) -> list[np.ndarray]:
        """The least sums of the stages from 0, 1, ... on, (chains, where they start)."""
        found = [self._start(self.chains.fixed_seconds.shape)[:, ::-1]]
        for s in reversed(range(len(self.stages))):
            cells = self.stages[s]
            through = found[-1][:, cells.stops] + self._seconds(s, high)
            found.append(cells.by_start.least(through, self.num_units + 1))
        return found[::-1]

    def _start(self, shape: tuple[int, ...]) -> np.ndarray:
        reach = np.full((*shape, self.num_units + 1), np.inf)
        reach[..., 0] = 0.0
        return reach
