"""The inner problem: strategies for the units of one stage, fastest under a memory budget. Solved exactly.

    minimize    sum over units u of t[u, o(u)]
    subject to  sum over units of h[u, o(u)] + max over units of w[u, o(u)]  <=  budget

with t the option's busy seconds in a step, h the bytes it holds (state, and activations of every microbatch in
flight) and w its working bytes. Two facts make it small:

* Units of one class are interchangeable, so only *how many* units take each option matters. `_repeated` builds the
  Pareto frontier (bytes, seconds) of n equal units by doubling: frontier(2n) = frontier(n) + frontier(n).
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
from galv.planner.search.table import Option, StageChoice


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
    num_microbatches: int,
    usable_bytes: float,
) -> StageChoice | None:
    """The fastest choice for a stage holding `counts` units that stays within `usable_bytes`; None when none does."""
    best = _unconstrained(counts, options, in_flight, num_microbatches)
    if best.peak_bytes <= usable_bytes:
        return best
    return _constrained(counts, options, in_flight, num_microbatches, usable_bytes)


def _unconstrained(
    counts: Counts, options: Mapping[str, Sequence[Option]], in_flight: int, num_microbatches: int
) -> StageChoice:
    """Every unit at its fastest; of equally fast options the one that holds least."""

    def preference(option: Option) -> tuple[float, float]:
        return option.seconds(num_microbatches), option.held_bytes(in_flight) + option.working_bytes

    picks = tuple((name, ((min(options[name], key=preference), number),)) for name, number in counts)
    return stage_choice(picks, in_flight)


def _constrained(
    counts: Counts,
    options: Mapping[str, Sequence[Option]],
    in_flight: int,
    num_microbatches: int,
    usable_bytes: float,
) -> StageChoice | None:
    best: tuple[float, StageChoice] | None = None
    for limit in _working_limits(counts, options):
        frontier = _stage_frontier(counts, options, limit, in_flight, num_microbatches)
        if frontier is None:
            continue
        fits = np.flatnonzero(frontier.held_bytes <= usable_bytes - limit)
        if len(fits) == 0:
            continue
        point = fits[np.argmin(frontier.seconds[fits])]
        if best is None or frontier.seconds[point] < best[0]:
            choice = _choice(counts, _allowed(counts, options, limit), frontier.uses[point], in_flight)
            best = (float(frontier.seconds[point]), choice)
    return best[1] if best else None


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


def _stage_frontier(
    counts: Counts, options: Mapping[str, Sequence[Option]], limit: float, in_flight: int, num_microbatches: int
) -> Frontier | None:
    total: Frontier | None = None
    for name, number in counts:
        points = tuple(
            (option.held_bytes(in_flight), option.seconds(num_microbatches))
            for option in options[name]
            if option.working_bytes <= limit
        )
        if not points:
            return None
        part = _repeated(points, number)
        total = part if total is None else _sum(total, part)
    return total


@lru_cache(maxsize=4096)
def _repeated(points: tuple[tuple[float, float], ...], number: int) -> Frontier:
    """The frontier of `number` units that each take one of `points` (bytes, seconds)."""
    if number == 1:
        held, seconds = np.array(points).T
        return _pruned(held, seconds, np.eye(len(points), dtype=np.int64))
    half = _repeated(points, number // 2)
    doubled = _added(half, half)
    return doubled if number % 2 == 0 else _added(doubled, _repeated(points, 1))


def _added(a: Frontier, b: Frontier) -> Frontier:
    """Frontier of running both, over the same options."""
    held = (a.held_bytes[:, None] + b.held_bytes[None, :]).ravel()
    seconds = (a.seconds[:, None] + b.seconds[None, :]).ravel()
    uses = (a.uses[:, None, :] + b.uses[None, :, :]).reshape(len(held), -1)
    return _pruned(held, seconds, uses)


def _sum(a: Frontier, b: Frontier) -> Frontier:
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


def _choice(counts: Counts, allowed: Mapping[str, list[Option]], uses: np.ndarray, in_flight: int) -> StageChoice:
    picks, offset = [], 0
    for name, _ in counts:
        own = uses[offset : offset + len(allowed[name])]
        offset += len(allowed[name])
        picks.append((name, tuple((o, int(n)) for o, n in zip(allowed[name], own, strict=True) if n)))
    return stage_choice(tuple(picks), in_flight)


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
