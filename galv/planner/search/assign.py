"""The inner problem: strategies for the units of one stage, fastest under a memory budget. Solved exactly.

    minimize    sum over units u of t[u, o(u)]
    subject to  sum over units of h[u, o(u)] + max over units of w[u, o(u)]  <=  budget

with t the option's busy seconds in a step (or another weighted sum of its parts), h the bytes it holds (state, and
activations of every microbatch in flight) and w its working bytes. Two facts make it small:

* Units of one class are interchangeable, so only *how many* units take each option matters. `_Repeated` builds the
  Pareto frontier (bytes, seconds) of n equal units: frontier(n) = frontier(n - 1) + the options.
* The maximum over w takes one of few values. For each value W the options with w <= W are a plain knapsack with
  budget - W; the best of these is the optimum, since the true optimum appears at its own W.

Dominated points never come back under addition, so pruning keeps the optimum (Bellman).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from galv.cost_models.estimate import StageSeconds
from galv.planner.partition import Counts
from galv.planner.search.table import Option, StageChoice, Weights


@dataclass(frozen=True)
class Frontier:
    """Pareto-optimal ways to run some units: bytes rising, seconds falling, and how often each option is used."""

    held_bytes: np.ndarray
    seconds: np.ndarray
    uses: np.ndarray
    """(points, options of all classes so far)."""

    def __len__(self) -> int:
        return len(self.seconds)


def fastest(
    counts: Counts,
    options: Mapping[str, Sequence[Option]],
    *,
    in_flight: int,
    weights: Weights,
    usable_bytes: float,
) -> StageChoice | None:
    """The fastest choice for a stage holding `counts` units that stays within `usable_bytes`; None when none does.

    Fastest by the sum of forward, backward and once-a-step seconds with `weights`.
    """
    best = _unconstrained(counts, options, in_flight, weights)
    if best.peak_bytes <= usable_bytes:
        return best
    return _constrained(counts, options, in_flight, weights, usable_bytes)


def _unconstrained(
    counts: Counts, options: Mapping[str, Sequence[Option]], in_flight: int, weights: Weights
) -> StageChoice:
    """Every unit at its fastest; of equally fast options the one that holds least."""

    def preference(option: Option) -> tuple[float, float]:
        return option.weighted(weights), option.held_bytes(in_flight) + option.working_bytes

    picks = tuple((name, ((min(options[name], key=preference), number),)) for name, number in counts)
    return stage_choice(picks, in_flight)


def _constrained(
    counts: Counts,
    options: Mapping[str, Sequence[Option]],
    in_flight: int,
    weights: Weights,
    usable_bytes: float,
) -> StageChoice | None:
    best: StageChoice | None = None
    for limit in _working_limits(counts, options):
        allowed = _allowed(counts, options, limit)
        parts = [_frontier(allowed[name], n, in_flight, weights) for name, n in counts]
        uses = _best_uses(parts, usable_bytes - limit)
        if uses is None:
            continue
        choice = _choice(counts, allowed, uses, in_flight)
        if best is None or choice.busy.weighted(weights) < best.busy.weighted(weights):
            best = choice
    return best


def smallest_bytes(counts: Counts, options: Mapping[str, Sequence[Option]], *, in_flight: int) -> float:
    """The least peak bytes with which a stage holding `counts` units can run at all."""
    peaks = []
    for limit in _working_limits(counts, options):
        allowed = _allowed(counts, options, limit)
        if all(allowed[name] for name, _ in counts):
            held = sum(n * min(o.held_bytes(in_flight) for o in allowed[name]) for name, n in counts)
            peaks.append(held + limit)
    return min(peaks)


def _working_limits(counts: Counts, options: Mapping[str, Sequence[Option]]) -> list[float]:
    values = {option.working_bytes for name, _ in counts for option in options[name]}
    floor = max(min(option.working_bytes for option in options[name]) for name, _ in counts)
    return sorted(value for value in values if value >= floor)


def _allowed(counts: Counts, options: Mapping[str, Sequence[Option]], limit: float) -> dict[str, list[Option]]:
    return {name: [o for o in options[name] if o.working_bytes <= limit] for name, _ in counts}


def _frontier(options: Sequence[Option], number: int, in_flight: int, weights: Weights) -> Frontier:
    points = tuple((option.held_bytes(in_flight), option.weighted(weights)) for option in options)
    return _repeated(points)(number)


def _best_uses(parts: Sequence[Frontier], available_bytes: float) -> list[np.ndarray] | None:
    """How often each class uses each option in the fastest combination within `available_bytes`; None when none is.

    The frontiers of all classes but the largest are summed; for each point of the sum, the largest frontier's fastest
    point that still fits is found by bisection.
    """
    largest = max(range(len(parts)), key=lambda i: len(parts[i]))
    order = [i for i in range(len(parts)) if i != largest]
    rest = _EMPTY
    for i in order:
        rest = _side_by_side(rest, parts[i])
    main = parts[largest]
    fitting = np.searchsorted(main.held_bytes, available_bytes - rest.held_bytes, side="right") - 1
    seconds = np.where(fitting >= 0, rest.seconds + main.seconds[fitting], np.inf)
    point = int(np.argmin(seconds))
    if not np.isfinite(seconds[point]):
        return None
    own = np.split(rest.uses[point], np.cumsum([parts[i].uses.shape[1] for i in order])[:-1]) if order else []
    uses = dict(zip(order, own, strict=True)) | {largest: main.uses[fitting[point]]}
    return [uses[i] for i in range(len(parts))]


_EMPTY = Frontier(np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64))


class _Repeated:
    """Frontiers of 1, 2, 3, ... units that each take one of `points` (bytes, seconds), built as they are asked for."""

    def __init__(self, points: tuple[tuple[float, float], ...]) -> None:
        held, seconds = np.array(points).T
        self.found = [_pruned(held, seconds, np.eye(len(points), dtype=np.int64))]

    def __call__(self, number: int) -> Frontier:
        while len(self.found) < number:
            self.found.append(_added(self.found[-1], self.found[0]))
        return self.found[number - 1]


_repeated = lru_cache(maxsize=1024)(_Repeated)


def _added(a: Frontier, b: Frontier) -> Frontier:
    """Frontier of running both, over the same options."""
    held = (a.held_bytes[:, None] + b.held_bytes[None, :]).ravel()
    seconds = (a.seconds[:, None] + b.seconds[None, :]).ravel()
    uses = (a.uses[:, None, :] + b.uses[None, :, :]).reshape(len(held), -1)
    return _pruned(held, seconds, uses)


def _side_by_side(a: Frontier, b: Frontier) -> Frontier:
    """Frontier of running both, over options side by side."""
    left = Frontier(a.held_bytes, a.seconds, np.pad(a.uses, ((0, 0), (0, b.uses.shape[1]))))
    right = Frontier(b.held_bytes, b.seconds, np.pad(b.uses, ((0, 0), (a.uses.shape[1], 0))))
    return _added(left, right)


def _pruned(held: np.ndarray, seconds: np.ndarray, uses: np.ndarray) -> Frontier:
    order = np.lexsort((seconds, held))
    ordered = seconds[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ordered)[:-1]))
    keep = order[ordered < before]
    return Frontier(held[keep], seconds[keep], uses[keep])


def _choice(
    counts: Counts, allowed: Mapping[str, list[Option]], uses: Sequence[np.ndarray], in_flight: int
) -> StageChoice:
    picks = tuple(
        (name, tuple((o, int(n)) for o, n in zip(allowed[name], own, strict=True) if n))
        for (name, _), own in zip(counts, uses, strict=True)
    )
    return stage_choice(picks, in_flight)


def stage_choice(picks: tuple[tuple[str, tuple[tuple[Option, int], ...]], ...], in_flight: int) -> StageChoice:
    """The totals of a stage whose units take `picks`."""
    flat = [(option, count) for _, options in picks for option, count in options]
    return StageChoice(
        picks=picks,
        busy=StageSeconds(
            forward_seconds=sum(n * o.forward_seconds for o, n in flat),
            backward_seconds=sum(n * o.backward_seconds for o, n in flat),
            step_seconds=sum(n * o.step_seconds for o, n in flat),
        ),
        peak_bytes=sum(n * o.held_bytes(in_flight) for o, n in flat) + max(o.working_bytes for o, _ in flat),
    )
