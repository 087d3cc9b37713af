"""Pipelines of one chunk a rank: cells are squeezed between a bound and the best cut found until none is left.

Every cut takes at least the first microbatch's trip up and the last one's trip down, a sum over stages, plus what
the worst stage adds to it (`Shape.extras`), a maximum over stages. `Squeeze` bounds for each cell, a segment of the
chain on a stage, the best cut that has it. A cell whose bound is no better than the best cut found is dropped. What
a cell costs is known ever better: first with memory ignored, then with fractions of units, then exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np

from galv.planner.partition import Counts, segments
from galv.planner.search.menu import Menu
from galv.planner.search.solution import Found, Solution, better
from galv.planner.search.squeeze import Cells, Chains, Squeeze
from galv.planner.search.table import StageChoice, Weights
from galv.planner.search.walk import TOLERANCE, Walk

_Seconds = Callable[[int, Counts, Weights], float]
MAX_CUTS = 64
"""So many cuts that are left are bounded one by one."""
MAX_CHAINS = 8
"""So many chains of work bound the cuts of one table."""


@dataclass(eq=False)
class Line(Walk):
    """The walk over the cuts of one chunk a rank."""

    _choices: dict[tuple[Counts, float, Weights, int | None], StageChoice | None] = field(default_factory=dict)
    _exact: dict[tuple[Counts, float, Weights], float] = field(default_factory=dict)
    _tried: set[tuple[int, ...]] = field(default_factory=set)

    def solve(self) -> Found:
        """The best cut that beats the incumbent, if any, and a bound on all."""
        squeeze = self._squeezed(self._first())
        for refine in (self._relaxed, self._exactly):
            if not squeeze.is_empty and not self.is_over:
                squeeze = self._squeezed(self._refined(squeeze, refine))
        bound = squeeze.bound_seconds
        if bound < self.goal_seconds:
            bound = max(bound, self._one_by_one(squeeze))
        return Found(self.best, min(bound, self.goal_seconds))

    # -- the cuts that are left

    def _one_by_one(self, squeeze: Squeeze) -> float:
        """A bound on the cuts that are left, where they are few; 0 where they are many."""
        cuts = None if self.is_over else squeeze.cuts(MAX_CUTS)
        return 0.0 if cuts is None else min((self._cut_bound(cut) for cut in cuts), default=np.inf)

    def _cut_bound(self, cut: tuple[int, ...]) -> float:
        """A bound on all plans of one cut: the least that its stages need on the chain that takes longest in a good
        one.

        The choices that are least on that chain are tried as well.
        """
        bound, seen = 0.0, set[bytes]()
        found = min(self._evaluated(cut), key=lambda one: one.step_seconds, default=None)
        while found is not None and bound < self.goal_seconds and len(seen) < _CHAINS_OF_A_CUT:
            self._take(found)
            weights, fixed = self.shape.longest_chain([stage.busy for stage in found.stages])
            if weights.tobytes() in seen:
                break
            seen.add(weights.tobytes())
            bound = max(bound, fixed + self._least_on(cut, weights))
            found = self._with_weights(cut, [(float(f), float(b), 1.0 / len(weights)) for f, b in weights])
        return bound

    def _least_on(self, cut: tuple[int, ...], weights: np.ndarray) -> float:
        """The least seconds on a chain that visits each stage's forward and backward so often, with the step's end."""
        known, total, end = segments(self.table.chain), 0.0, 0.0
        for stage, ((start, stop), (forward, backward)) in enumerate(zip(pairwise(cut), weights.tolist(), strict=True)):
            counts = known.counts[known.ids[start, stop]]
            without = self._exactly(stage, counts, (forward, backward, 0.0))
            total += without
            end = max(end, self._exactly(stage, counts, (forward, backward, 1.0)) - without)
        return total + end

    # -- cells

    def _first(self) -> Squeeze:
        """All cells that can hold their units, with memory ignored in their seconds."""
        known, chain = segments(self.table.chain), self.table.chain
        names = list(self.table.options)
        numbers = np.array([[dict(counts).get(name, 0) for name in names] for counts in known.counts], float)
        trips = numbers @ self._least_each(names, self.shape.trip)
        stages = []
        for s in range(self.shape.num_ranks):
            starts, stops = _segments_of(s, self.shape.num_ranks, len(chain))
            ids = known.ids[starts, stops]
            extras = np.max([numbers @ self._least_each(names, w) for w in self.shape.extras(s)], axis=0)
            laps = numbers @ self._least_each(names, self.shape.lap)
            cells = Cells(starts, stops, trips[ids], extras[ids], laps[ids])
            stages.append(cells.kept(self._may_fit(s, names, numbers)[ids]))
        trip = Chains(np.ones((1, self.shape.num_ranks)), np.array([self.shape.trip_transfers_seconds]))
        return Squeeze(stages, len(chain), trip)

    def _least_each(self, names: Sequence[str], weights: Weights) -> np.ndarray:
        return np.array([min(o.weighted(weights) for o in self.table.options[name]) for name in names])

    def _may_fit(self, stage: int, names: Sequence[str], numbers: np.ndarray) -> np.ndarray:
        """For each segment's counts whether its least bytes fit, held and working each on its own."""
        menus = [self._menu(name, self.shape.in_flight(stage)) for name in names]
        held = numbers @ np.array([menu.held_bytes.min() for menu in menus])
        working = np.where(numbers > 0, np.array([menu.working_bytes.min() for menu in menus]), 0.0).max(axis=1)
        return np.asarray(held + working <= self.table.usable_bytes * (1 + TOLERANCE))

    def _menu(self, name: str, in_flight: float) -> Menu:
        return self.assigner.menu(name, (0.0, 0.0, 0.0), in_flight, by_layout=False)

    def _refined(self, squeeze: Squeeze, seconds: _Seconds) -> Squeeze:
        """The same cells with their seconds found by `seconds`."""
        known, stages = segments(self.table.chain), []
        for s, cells in enumerate(squeeze.stages):
            ids, where = np.unique(known.ids[cells.starts, cells.stops], return_inverse=True)
            counts = [known.counts[i] for i in ids]
            trips = np.array([seconds(s, c, self.shape.trip) for c in counts])
            extras = np.array([max(seconds(s, c, w) for w in self.shape.extras(s)) for c in counts])
            laps = np.array([seconds(s, c, self.shape.lap) for c in counts])
            refined = Cells(cells.starts, cells.stops, trips[where], extras[where], laps[where])
            stages.append(refined.kept(np.isfinite(trips[where])))
        return Squeeze(stages, squeeze.num_units, squeeze.chains)

    def _relaxed(self, stage: int, counts: Counts, weights: Weights) -> float:
        return self.assigner.relaxed_seconds(
            counts, in_flight=self.shape.in_flight(stage), weights=weights, usable_bytes=self.table.usable_bytes
        )

    def _exactly(self, stage: int, counts: Counts, weights: Weights) -> float:
        key = counts, self.shape.in_flight(stage), weights
        if key not in self._exact:
            self._exact[key] = self.assigner.free_seconds(
                counts, in_flight=key[1], weights=weights, usable_bytes=self.table.usable_bytes
            )
        return self._exact[key]

    # -- squeezing

    def _squeezed(self, squeeze: Squeeze) -> Squeeze:
        """Only the cells that a cut below the goal can have; tries some cuts on the way, which lower the goal."""
        for _ in range(_ROUNDS):
            if squeeze.is_empty or self.is_over:
                break
            chains = self._tried_some(squeeze)
            goal = self.goal_seconds
            which = [cost < goal for cost in squeeze.costs]
            if all(mine.all() for mine in which) and chains is squeeze.chains:
                break
            squeeze = replace(squeeze.kept(which), chains=chains)
        return squeeze

    def _tried_some(self, squeeze: Squeeze) -> Chains:
        """Looks at cuts of least trip under some thresholds; the chains with one more that such a cut takes longer
        for.
        """
        chains, (_, highs) = squeeze.chains, squeeze.thresholds
        for high in highs[:: max(1, len(highs) // _TRIES)]:
            found = squeeze.cut(float(high))
            if found is None or found[2] >= self.goal_seconds:
                continue
            cut, laps, bound = found
            self.consider(cut)
            if len(chains.visits) < MAX_CHAINS:
                visits, fixed = self.shape.longest_loop(laps)
                if visits @ laps + fixed > bound * (1 + TOLERANCE):
                    chains = chains.more(visits, fixed)
        return chains

    def consider(self, cut: tuple[int, ...]) -> None:
        """Takes `cut` as the best if it is."""
        if cut not in self._tried:
            self._tried.add(cut)
            for found in self._evaluated(cut):
                self._take(found)

    def _take(self, found: Solution) -> None:
        if found.step_seconds < self.incumbent_seconds:
            self.best = better(self.best, found)

    def _evaluated(self, cut: tuple[int, ...]) -> Iterator[Solution]:
        """The cut with its stages' fastest choices, by a whole step's work and by each chain of work."""
        for kind in range(1 + len(self.shape.extras(0))):
            found = self._with_weights(cut, [self._weights(stage, kind) for stage in range(self.shape.num_ranks)])
            if found is not None:
                yield found

    def _with_weights(self, cut: tuple[int, ...], weights: Sequence[Weights]) -> Solution | None:
        """The cut with its stages' fastest choices by `weights`, one for each stage."""
        stages: list[StageChoice] = []
        for stage, ends in enumerate(pairwise(cut)):
            choice = self._choice(stage, ends, weights[stage], stages[-1] if stages else None)
            if choice is None:
                return None
            stages.append(choice)
        return Solution(cut, tuple(stages), self.shape.step_seconds([stage.busy for stage in stages]))

    def _weights(self, stage: int, kind: int) -> Weights:
        if kind == 0:
            return self.shape.busy
        trip, extra = self.shape.trip, self.shape.extras(stage)[kind - 1]
        return trip[0] + extra[0], trip[1] + extra[1], trip[2] + extra[2]

    def _choice(
        self, stage: int, ends: tuple[int, int], weights: Weights, before: StageChoice | None
    ) -> StageChoice | None:
        entry = before.last.layout if before is not None and self.assigner.has_layouts else None
        units = tuple((name, len(list(run))) for name, run in groupby(self.table.chain[slice(*ends)]))
        key = units, self.shape.in_flight(stage), weights, entry
        if key not in self._choices:
            self._choices[key] = self.assigner.fastest(
                units, in_flight=key[1], weights=weights, usable_bytes=self.table.usable_bytes, entry=entry
            )
        return self._choices[key]


_TRIES = 6
_ROUNDS = 30
_CHAINS_OF_A_CUT = 4


def _segments_of(stage: int, num_stages: int, num_units: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the segments that `stage` can hold so that every other stage still gets a unit."""
    later = num_stages - 1 - stage
    starts = np.arange(num_units + 1)[:, None]
    stops = np.arange(num_units + 1)[None, :]
    first = starts >= stage if stage else starts == 0
    last = stops <= num_units - later if later else stops == num_units
    found = np.nonzero(first & last & (starts < stops))
    return found[0], found[1]
