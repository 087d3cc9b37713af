"""The inner problem: strategies for the units of one stage, fastest under a memory budget. Solved exactly.

    minimize    sum over units u of t[u, o(u)]  +  sum over neighbours u, v of c[layout of o(u), layout of o(v)]
    subject to  sum over units of h[u, o(u)]  +  max over units of w[u, o(u)]  <=  budget

with t the option's weighted seconds, h the bytes it holds (state, and activations of the microbatches in flight), w its
working bytes and c the weighted seconds between layouts. Four facts make it small:

* Equal units in a row are interchangeable: their frontiers of (bytes, seconds) are built by doubling (`frontier`).
* The maximum over w takes one of few values. For each value W the options with w <= W share budget - W; the best of
these
  is the optimum, since the true optimum appears at its own W. A Lagrangian bound orders the values and ends the walk.
* The relaxation (fractions of units, layouts free) has a price for a byte. At that price, an optimum that is at most
  `slack` slower than the relaxation has no part that is more than `slack` above its own least. One unit moved along the
  hull makes the relaxed optimum whole, so that is the slack without layouts; with them it grows until something is
  found.
* Where the relaxed optimum keeps to one layout, it is the optimum: between equal layouts nothing is paid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from galv.cost_models.estimate import StageSeconds
from galv.planner.partition import Counts
from galv.planner.search import frontier
from galv.planner.search.frontier import Frontier, Price
from galv.planner.search.layouts import Sets, cheapest, has_no_detours
from galv.planner.search.menu import (
    Columns,
    Menu,
    Relaxed,
    lagrangian_seconds,
    least_held,
    relaxed,
    working_limits,
)
from galv.planner.search.table import CostTable, Option, StageChoice, Transitions, Weights

_TOLERANCE = 1e-12


@dataclass(eq=False)
class Assigner:
    """Solves stages of one table, and remembers the columns of its options."""

    options: Mapping[str, tuple[Option, ...]]
    transitions: Transitions = field(default_factory=dict)
    _columns: dict[str, Columns] = field(default_factory=dict)
    _menus: dict[tuple[str, Weights, float, bool, frozenset[int] | None], Menu] = field(default_factory=dict)
    _between: dict[Weights, np.ndarray] = field(default_factory=dict)
    _detours: dict[Weights, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, table: CostTable) -> Assigner:
        """One for `table`."""
        return cls(table.options, table.transitions)

    def fastest(
        self,
        units: Counts,
        *,
        in_flight: float,
        weights: Weights,
        usable_bytes: float,
        entry: int | None = None,
        at_most: float = np.inf,
    ) -> StageChoice | None:
        """The fastest choice for a stage of `units`, in their order, within `usable_bytes`; None when there is none.

        Fastest by the sum of forward, backward and once-a-step seconds with `weights`. `entry` is the layout that the
        first unit gets its activation in; None when any is free of cost. Choices slower than `at_most` are not looked
        for.
        """
        stage = _Stage(self, units, float(in_flight), weights, usable_bytes, entry)
        sequence = stage.solve(at_most)
        if sequence is None:
            return None
        return stage_choice(sequence, in_flight, transitions=self.transitions, entry=entry)

    def free_seconds(
        self, units: Counts, *, in_flight: float, weights: Weights, usable_bytes: float, at_most: float = np.inf
    ) -> float:
        """A bound on `fastest`: its seconds with nothing paid between layouts; infinite when more than `at_most`."""
        stage = _Stage(self, units, float(in_flight), weights, usable_bytes, None)
        sequence = stage.solve_free(at_most)
        return np.inf if sequence is None else sum(option.weighted(weights) for _, option in sequence)

    def relaxed_seconds(self, units: Counts, *, in_flight: float, weights: Weights, usable_bytes: float) -> float:
        """A bound on `fastest`: the best over fractions of units, no cost between layouts, least working bytes."""
        menus = {name: self.menu(name, weights, in_flight, by_layout=False) for name, _ in units}
        floor = max(float(menus[name].working_bytes.min()) for name, _ in units)
        return relaxed(units, menus, usable_bytes - floor).seconds

    def byte_price(self, units: Counts, *, in_flight: float, weights: Weights, usable_bytes: float) -> float:
        """Weighted seconds that one byte more would save, in the relaxation of `relaxed_seconds`."""
        menus = {name: self.menu(name, weights, in_flight, by_layout=False) for name, _ in units}
        floor = max(float(menus[name].working_bytes.min()) for name, _ in units)
        return relaxed(units, menus, usable_bytes - floor).seconds_per_byte

    def smallest_bytes(self, units: Counts, *, in_flight: float) -> float:
        """The least peak bytes with which a stage of `units` can run at all; infinite when layouts forbid it."""
        weights = (0.0, 0.0, 0.0)
        menus = {name: self.menu(name, weights, in_flight, by_layout=False) for name, _ in units}
        limits = working_limits(units, menus)
        peaks = least_held(units, menus, limits) + limits
        if not self.has_layouts:
            return float(peaks.min())
        best, stage = np.inf, _Stage(self, units, float(in_flight), weights, np.inf, None)
        for place in np.argsort(peaks):
            if peaks[place] >= best:
                break
            found = stage.frontier_below(float(limits[place]), Price())
            best = min(best, float(found.held_bytes.min(initial=np.inf)) + float(limits[place]))
        return best

    @cached_property
    def has_layouts(self) -> bool:
        """Whether units can differ in layout."""
        return len({option.layout for options in self.options.values() for option in options}) > 1

    def menu(
        self,
        name: str,
        weights: Weights,
        in_flight: float,
        *,
        by_layout: bool,
        layouts: frozenset[int] | None = None,
    ) -> Menu:
        """The options of a class that can matter, of some layouts or of all."""
        key = (name, weights, in_flight, by_layout, layouts)
        if key not in self._menus:
            columns = self._columns.setdefault(name, Columns(tuple(self.options[name])))
            self._menus[key] = columns.menu(weights, in_flight, by_layout=by_layout, layouts=layouts)
        return self._menus[key]

    def has_no_detours(self, weights: Weights) -> bool:
        """Whether going over a third layout never pays, by `weights`."""
        if weights not in self._detours:
            self._detours[weights] = has_no_detours(self.between(weights))
        return self._detours[weights]

    def between(self, weights: Weights) -> np.ndarray:
        """Weighted seconds from layout to layout: infinite where they cannot stand next to each other."""
        if weights not in self._between:
            known = {option.layout for options in self.options.values() for option in options}
            size = 1 + max(known.union(*self.transitions))
            seconds = np.full((size, size), np.inf)
            np.fill_diagonal(seconds, 0.0)
            for (before, after), (forward, backward) in self.transitions.items():
                if before != after:
                    seconds[before, after] = weights[0] * forward + weights[1] * backward
            self._between[weights] = seconds
        return self._between[weights]


@dataclass(frozen=True, eq=False)
class _Stage:
    """One inner problem."""

    assigner: Assigner
    units: Counts
    """Runs of equal units, in order."""
    in_flight: float
    weights: Weights
    usable_bytes: float
    entry: int | None
    sets: Sets | None = None
    """The layouts that each class may have; None for all."""

    @cached_property
    def counts(self) -> Counts:
        """How many units of each class."""
        found: dict[str, int] = {}
        for name, number in self.units:
            found[name] = found.get(name, 0) + number
        return tuple(found.items())

    def menus(self, *, by_layout: bool) -> dict[str, Menu]:
        found = {}
        for name, _ in self.counts:
            layouts = None if self.sets is None else self.sets[name]
            found[name] = self.assigner.menu(name, self.weights, self.in_flight, by_layout=by_layout, layouts=layouts)
        return found

    def solve(self, at_most: float) -> list[tuple[str, Option]] | None:
        """The optimum as the option of every unit."""
        free = self.solve_free(at_most)
        if free is None or self._pays_nothing(free):
            return free
        between = self.assigner.between(self.weights)
        if len(self.counts) == len(self.units) and self.assigner.has_no_detours(self.weights):
            names = [name for name, _ in self.units]
            known = {name: frozenset(o.layout for o in self.assigner.options[name]) for name in names}
            return cheapest(names, self._within_sets, known, between, self.entry, at_most)
        return self._best(at_most, with_layouts=True)

    def _within_sets(self, sets: Sets, at_most: float) -> tuple[float, list[tuple[str, Option]]] | None:
        """The optimum with nothing paid between layouts over some layouts of each class, and its seconds."""
        sequence = replace(self, sets=sets).solve_free(at_most)
        return None if sequence is None else (sum(o.weighted(self.weights) for _, o in sequence), sequence)

    def solve_free(self, at_most: float) -> list[tuple[str, Option]] | None:
        """The optimum with nothing paid between layouts, units in no order."""
        return self._best(at_most, with_layouts=False)

    def _pays_nothing(self, sequence: list[tuple[str, Option]]) -> bool:
        layouts = {option.layout for _, option in sequence}
        return len(layouts) == 1 and (self.entry is None or self.entry in layouts)

    def _best(self, at_most: float, *, with_layouts: bool) -> list[tuple[str, Option]] | None:
        """The optimum over all working limits, with or without cost between layouts."""
        free = self.menus(by_layout=False)
        if not with_layouts and (simple := self._all_fastest(free)) is not None:
            return simple
        limits = working_limits(self.counts, self.menus(by_layout=with_layouts))
        limits = limits[least_held(self.counts, free, limits) + limits <= self.usable_bytes]
        if not len(limits):
            return None
        price = max(relaxed(self.counts, free, self.usable_bytes - limits[0]).seconds_per_byte, 0.0)
        bounds = lagrangian_seconds(self.counts, free, limits, self.usable_bytes, price)
        best, seconds = None, at_most
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] > seconds * (1 - _TOLERANCE):
                break
            found = self._within(float(limits[place]), seconds, with_layouts=with_layouts)
            if found is not None and found[0] <= seconds:
                seconds, best = found
        return best

    def _all_fastest(self, menus: Mapping[str, Menu]) -> list[tuple[str, Option]] | None:
        """Every unit at its fastest, if that fits."""
        place = {name: menu.fastest for name, menu in menus.items()}
        held = sum(number * float(menus[name].held_bytes[place[name]]) for name, number in self.counts)
        if held + max(float(menus[name].working_bytes[place[name]]) for name, _ in self.counts) > self.usable_bytes:
            return None
        picked = {name: self.assigner.options[name][menu.choices[place[name]]] for name, menu in menus.items()}
        return [(name, picked[name]) for name, number in self.units for _ in range(number)]

    def _within(
        self, limit: float, at_most: float, *, with_layouts: bool
    ) -> tuple[float, list[tuple[str, Option]]] | None:
        """The optimum under one working limit and its seconds; None when none is at most `at_most`."""
        available = self.usable_bytes - limit
        menus = {name: menu.below(limit) for name, menu in self.menus(by_layout=False).items()}
        bound = relaxed(self.counts, menus, available)
        if not np.isfinite(bound.seconds) or bound.seconds > at_most:
            return None
        spare = available - sum(number * float(menus[name].held_bytes.min()) for name, number in self.counts)
        enough = (at_most - bound.seconds) * (1 + 1e-9) + 1e-12 * abs(at_most) if np.isfinite(at_most) else np.inf
        for wanted in self._slacks(bound, with_layouts=with_layouts):
            slack = min(wanted, enough)
            price = Price(bound.seconds_per_byte, slack, spare + _TOLERANCE * available)
            found = self.frontier_below(limit, price, with_layouts=with_layouts)
            fits = found.held_bytes <= available
            if fits.any():
                way = int(np.argmin(np.where(fits, found.seconds, np.inf)))
                if found.seconds[way] <= bound.seconds + slack:
                    return float(found.seconds[way]), self._sequence(
                        found, way, limit, price, with_layouts=with_layouts
                    )
            if slack == enough:
                return None
        return None

    def _slacks(self, bound: Relaxed, *, with_layouts: bool) -> Sequence[float]:
        """How far above the relaxed optimum to look, until something is found."""
        whole = max(bound.unit_seconds, 1e-9 * abs(bound.seconds)) * (1 + 1e-9)
        deeper = _DEEPENINGS if with_layouts else 1
        return (*(whole * 4.0**step for step in range(-3, deeper)), np.inf)

    def _sequence(
        self, found: Frontier, way: int, limit: float, price: Price, *, with_layouts: bool
    ) -> list[tuple[str, Option]]:
        menus = self._narrowed(limit, price, with_layouts=with_layouts)
        runs = self.units if with_layouts else self.counts
        names = [name for name, number in runs for _ in range(number)]
        options = self.assigner.options
        return [
            (name, options[name][menus[name].choices[i]]) for name, i in zip(names, found.options(way), strict=True)
        ]

    def _narrowed(self, limit: float, price: Price, *, with_layouts: bool) -> dict[str, Menu]:
        menus = self.menus(by_layout=with_layouts)
        return {name: m.below(limit).within(price.seconds_per_byte, price.slack) for name, m in menus.items()}

    def frontier_below(self, limit: float, price: Price, *, with_layouts: bool = True) -> Frontier:
        """The frontier of all units under one working limit, in order where layouts matter."""
        between = self.assigner.between(self.weights) if with_layouts else np.zeros((1, 1))
        menus = self._narrowed(limit, price, with_layouts=with_layouts)
        units: dict[str, Frontier] = {}
        whole: Frontier | None = None
        for name, number in self.units if with_layouts else self.counts:
            if name not in units:
                menu = menus[name]
                units[name] = frontier.of_unit(menu.layouts, menu.held_bytes, menu.seconds, price)
            run = frontier.repeated(units[name], number, between, price)
            if whole is None:
                whole = run if self.entry is None or not with_layouts else frontier.entered(run, between[self.entry])
            else:
                whole = frontier.joined(whole, run, between, price)
        assert whole is not None, "a stage has units"
        return whole


_DEEPENINGS = 12


def stage_choice(
    sequence: Sequence[tuple[str, Option]],
    in_flight: float,
    *,
    transitions: Transitions | None = None,
    entry: int | None = None,
) -> StageChoice:
    """The totals of a stage whose units take `sequence`, in order; `entry` as for `Assigner.fastest`."""
    options = [option for _, option in sequence]
    layouts = [option.layout for option in options]
    before = [layouts[0] if entry is None else entry, *layouts]
    changes = [(transitions or {}).get(pair, (0.0, 0.0)) for pair in pairwise(before) if pair[0] != pair[1]]
    return StageChoice(
        picks=tuple((name, _counted(run)) for name, run in groupby(sequence, key=lambda unit: unit[0])),
        busy=StageSeconds(
            forward_seconds=sum(o.forward_seconds for o in options) + sum(forward for forward, _ in changes),
            backward_seconds=sum(o.backward_seconds for o in options) + sum(backward for _, backward in changes),
            step_seconds=sum(o.step_seconds for o in options),
            weight_seconds=sum(o.weight_seconds for o in options),
        ),
        peak_bytes=sum(o.held_bytes(in_flight) for o in options) + max(o.working_bytes for o in options),
    )


def _counted(run: Iterable[tuple[str, Option]]) -> tuple[tuple[Option, int], ...]:
    return tuple((option, len(list(same))) for option, same in groupby(option for _, option in run))
