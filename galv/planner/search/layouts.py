"""Which layouts the runs of a stage use: branch and bound over sets, where no detour between layouts pays.

If going from layout to layout over a third never costs less (the triangle inequality), a run of equal units goes
through each of its layouts once, so what it pays depends only on the sets of layouts that the runs use: the cheapest
order of each set, one after the other. With the sets open, the units' own seconds are a problem without layouts. Its
optimum uses certain sets; either the true optimum uses all of these, then it is no better than this one with what
these sets pay, or it lacks one of them: one branch for each, with those before it in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise, permutations

import numpy as np

from galv.planner.search.table import Option

Sets = Mapping[str, frozenset[int]]
Sequenced = list[tuple[str, Option]]
MOST_IN_A_RUN = 5


def has_no_detours(between: np.ndarray) -> bool:
    """Whether no way over a third layout costs less than the direct one."""
    over = np.min(between[:, :, None] + between[None, :, :], axis=1)
    return bool(np.all(between <= over * (1 + 1e-12)))


def cheapest(
    names: Sequence[str],
    solve: Callable[[Sets, float], tuple[float, Sequenced] | None],
    known: Sets,
    between: np.ndarray,
    entry: int | None,
    at_most: float,
) -> Sequenced | None:
    """The best sequence for runs of classes `names`, each class in one run; None when none is at most `at_most`.

    `solve(sets, at_most)` gives the seconds and the options of the best units without layouts that keep to `sets`;
    `known` are all layouts of each class.
    """
    best: Sequenced | None = None
    order, empty = count(), {name: frozenset[int]() for name in names}
    heap: list[tuple[float, int, Sets, Sets]] = [(-np.inf, next(order), known, empty)]
    while heap:
        bound, _, allowed, used = heapq.heappop(heap)
        if bound > at_most:
            break
        least, _ = _paid(names, used, between, entry)
        found = solve(allowed, at_most - least)
        if found is None:
            continue
        seconds, sequence = found
        uses = {name: frozenset(o.layout for own, o in sequence if own == name) for name in names}
        paid, orders = _paid(names, uses, between, entry)
        if np.isfinite(paid) and seconds + paid <= at_most and (best is None or seconds + paid < at_most):
            at_most, best = seconds + paid, _ordered(sequence, orders)
        for name, layout, more in _branches(names, uses, used):
            if len(allowed[name]) > 1:
                lower, _ = _paid(names, more, between, entry)
                if np.isfinite(lower) and (seconds + lower < at_most or best is None):
                    fewer = {**allowed, name: allowed[name] - {layout}}
                    heapq.heappush(heap, (seconds + lower, next(order), fewer, more))
    return best


def _branches(names: Sequence[str], uses: Sets, used: Sets) -> Iterator[tuple[str, int, Sets]]:
    """Each layout to do without, and what is in use then."""
    more = dict(used)
    for name in names:
        for layout in sorted(uses[name] - used[name]):
            yield name, layout, dict(more)
            more[name] = more[name] | {layout}


def _paid(
    names: Sequence[str], sets: Sets, between: np.ndarray, entry: int | None
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """What the cheapest order of the sets pays, and that order; runs of open sets are passed free of cost."""
    reach: dict[int | None, tuple[float, dict[str, tuple[int, ...]]]] = {entry: (0.0, {})}
    for name in names:
        after: dict[int | None, tuple[float, dict[str, tuple[int, ...]]]] = {}
        for before, (seconds, orders) in reach.items():
            for walk in permutations(sets[name]) if sets[name] else [()]:
                steps = [before, *walk]
                paid = seconds + sum(
                    float(between[a, b]) for a, b in pairwise(steps) if a is not None and b is not None
                )
                last = walk[-1] if walk else None
                if last not in after or paid < after[last][0]:
                    after[last] = paid, {**orders, name: walk}
        reach = after
    return min(reach.values(), key=lambda one: one[0])


def _ordered(sequence: Sequenced, orders: Mapping[str, tuple[int, ...]]) -> Sequenced:
    """The units with each run's layouts in order."""
    return sorted(sequence, key=lambda unit: (list(orders).index(unit[0]), orders[unit[0]].index(unit[1].layout)))
