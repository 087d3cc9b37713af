"""A unit class's options as columns of numbers, under given weights and microbatches in flight.

Also the relaxation that every exact step starts from: with units free to mix options in fractions and no cost between
layouts, the best is a walk along the classes' lower convex hulls, cheapest seconds per byte first (Dantzig 1957). Its
last price turns every option's bytes into seconds (`Relaxed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from galv.planner.partition import Counts
from galv.planner.search.table import Option, Weights


@dataclass(frozen=True, eq=False)
class Columns:
    """All numbers of a class's options, one column each; independent of weights."""

    options: tuple[Option, ...]

    @cached_property
    def times(self) -> np.ndarray:
        """(options, 3): forward, backward, once a step."""
        return np.array([(o.forward_seconds, o.backward_seconds, o.step_seconds) for o in self.options], float)

    @cached_property
    def state_bytes(self) -> np.ndarray:
        return np.array([o.state_bytes for o in self.options], float)

    @cached_property
    def activation_bytes(self) -> np.ndarray:
        return np.array([o.activation_bytes for o in self.options], float)

    @cached_property
    def working_bytes(self) -> np.ndarray:
        return np.array([o.working_bytes for o in self.options], float)

    @cached_property
    def layouts(self) -> np.ndarray:
        return np.array([o.layout for o in self.options])

    def menu(
        self, weights: Weights, in_flight: float, *, by_layout: bool, layouts: frozenset[int] | None = None
    ) -> Menu:
        """The options that no other beats in seconds, held and working bytes; with `by_layout` no other of its layout.

        Only those of `layouts`, if they are given.
        """
        seconds = self.times @ np.array(weights)
        held = self.state_bytes + in_flight * self.activation_bytes
        group = self.layouts if by_layout else np.zeros(len(seconds), dtype=np.int64)
        order = np.lexsort((self.working_bytes, held, seconds))
        if layouts is not None:
            order = order[np.isin(self.layouts[order], list(layouts))]
        numbers = np.stack([seconds, held, self.working_bytes])[:, order]
        covers = np.all(numbers[:, :, None] <= numbers[:, None, :], axis=0)
        covers &= group[order][:, None] == group[order][None, :]
        # Of equal options the first stays, so an option can only be covered by one before it.
        kept = order[~np.any(np.triu(covers, 1), axis=0)]
        return Menu(kept, seconds[kept], held[kept], self.working_bytes[kept], group[kept])


@dataclass(frozen=True, eq=False)
class Menu:
    """What one unit of a class may take. Seconds rise along the arrays."""

    choices: np.ndarray
    """Positions among the class's options."""
    seconds: np.ndarray
    held_bytes: np.ndarray
    working_bytes: np.ndarray
    layouts: np.ndarray

    @cached_property
    def fastest(self) -> int:
        """The place of the fastest; of equally fast ones, of that which needs least bytes in all."""
        ties = int(np.searchsorted(self.seconds, self.seconds[0] * (1 + _ROUNDING), side="right"))
        whole = (self.held_bytes + self.working_bytes)[:ties]
        return int(np.lexsort((self.choices[:ties], whole))[0])

    def below(self, limit: float) -> Menu:
        """Those with at most `limit` working bytes."""
        fit = self.working_bytes <= limit
        return self if fit.all() else Menu(*(column[fit] for column in self._columns))

    def within(self, seconds_per_byte: float, slack: float) -> Menu:
        """Those whose priced seconds exceed the least by at most `slack`."""
        priced = self.seconds + seconds_per_byte * self.held_bytes
        fit = priced <= priced.min(initial=np.inf) + slack
        return self if fit.all() else Menu(*(column[fit] for column in self._columns))

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.choices, self.seconds, self.held_bytes, self.working_bytes, self.layouts

    @cached_property
    def hull(self) -> tuple[tuple[float, float], ...]:
        """The lower convex hull of (held bytes, seconds), from the fastest option to the one that holds least."""
        hull: list[tuple[float, float]] = []
        for point in zip(self.held_bytes.tolist(), self.seconds.tolist(), strict=True):
            if hull and point[0] >= hull[-1][0]:
                continue
            while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            hull.append(point)
        return tuple(hull)


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Seconds paid for each byte saved."""
    return (b[1] - a[1]) / (a[0] - b[0])


@dataclass(frozen=True)
class Relaxed:
    """The best of a stage with units free to mix options in fractions."""

    seconds: float
    """Infinite when not even so the bytes suffice."""
    seconds_per_byte: float
    unit_seconds: float
    """What moving one whole unit along the last hull edge costs: a plan of whole units costs at most this more."""


def relaxed(counts: Counts, menus: Mapping[str, Menu], available_bytes: float) -> Relaxed:
    """The relaxed optimum of a stage that may hold `available_bytes`."""
    seconds = held = 0.0
    edges: list[tuple[float, float, float, int]] = []
    for name, number in counts:
        hull = menus[name].hull
        if not hull:
            return Relaxed(np.inf, 0.0, 0.0)
        held += number * hull[0][0]
        seconds += number * hull[0][1]
        edges += [(_slope(a, b), b[1] - a[1], a[0] - b[0], number) for a, b in pairwise(hull)]
    excess, price, unit = held - available_bytes, 0.0, 0.0
    for edge in sorted(edges):
        if excess <= 0:
            break
        price, unit, saved, number = edge
        share = min(1.0, excess / (number * saved))
        seconds += share * number * unit
        excess = excess - number * saved if share == 1.0 else 0.0
    return Relaxed(float(seconds) if excess <= _ROUNDING * abs(available_bytes) else np.inf, price, unit)


_ROUNDING = 1e-12


def lagrangian_seconds(
    counts: Counts, menus: Mapping[str, Menu], limits: np.ndarray, usable_bytes: float, seconds_per_byte: float
) -> np.ndarray:
    """For each working limit a bound on the seconds of stages that stay within it, at a given price of bytes."""
    total = -seconds_per_byte * (usable_bytes - limits)
    for name, number in counts:
        menu = menus[name]
        order = np.argsort(menu.working_bytes, kind="stable")
        least = np.minimum.accumulate((menu.seconds + seconds_per_byte * menu.held_bytes)[order])
        fitting = np.searchsorted(menu.working_bytes[order], limits, side="right")
        total = total + number * np.where(fitting > 0, least[np.maximum(fitting, 1) - 1], np.inf)
    return total


def least_held(counts: Counts, menus: Mapping[str, Menu], limits: np.ndarray) -> np.ndarray:
    """For each working limit the fewest bytes that the units hold; infinite where a class has no option."""
    total = np.zeros(len(limits))
    for name, number in counts:
        menu = menus[name]
        order = np.argsort(menu.working_bytes, kind="stable")
        least = np.minimum.accumulate(menu.held_bytes[order])
        fitting = np.searchsorted(menu.working_bytes[order], limits, side="right")
        total = total + number * np.where(fitting > 0, least[np.maximum(fitting, 1) - 1], np.inf)
    return total


def working_limits(counts: Sequence[tuple[str, int]], menus: Mapping[str, Menu]) -> np.ndarray:
    """The values that the largest working set of a stage can take, ascending."""
    values = np.unique(np.concatenate([menus[name].working_bytes for name, _ in counts]))
    floor = max(menus[name].working_bytes.min(initial=np.inf) for name, _ in counts)
    return np.asarray(values[values >= floor])
