"""How many activations a pipeline rank holds: of microbatches whose backward is to come, and of those whose weight
gradients are.

Between the two parts of a split backward a chunk keeps only the factors of its weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from galv.cost_models.makespan import least_microbatches
from galv.planner.plan import ScheduleName
from galv.schedules import orders


class Held(NamedTuple):
    """Microbatches that one chunk holds something of."""

    whole: int
    """Forward has run, backward has not."""
    factors: int
    """Only weight gradients are left to be made."""


@lru_cache(maxsize=4096)
def held(
    schedule: ScheduleName, rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[tuple[Held, ...], ...]:
    """What a rank holds when it holds most: one entry for each moment that no other exceeds in every count.

    Each has one entry for each of the rank's chunks, in the order of the model.
    """
    m = least_microbatches(schedule, num_ranks, num_microbatches)
    run = orders(schedule, num_ranks, m, virtual_stages).ranks[rank]
    counts = {operation.chunk: Held(0, 0) for operation in sorted(run, key=lambda operation: operation.chunk)}
    changes = {"forward": (1, 0), "backward": (-1, 0), "input": (-1, 1), "weight": (0, -1)}
    found: set[tuple[Held, ...]] = set()
    for kind, chunk, _ in run:
        whole, factors = counts[chunk]
        more, less = changes[kind]
        if kind == "weight":
            found.add(tuple(counts.values()))
        counts[chunk] = Held(whole + more, factors + less)
        found.add(tuple(counts.values()))
    return tuple(sorted(mine for mine in found if not any(_exceeds(other, mine) for other in found)))


def _exceeds(other: tuple[Held, ...], mine: tuple[Held, ...]) -> bool:
    pairs = zip(other, mine, strict=True)
    return other != mine and all(x.whole >= y.whole and x.factors >= y.factors for x, y in pairs)


def held_bytes(
    moments: Sequence[Sequence[Held]], activation_bytes: Sequence[float], factor_bytes: Sequence[float]
) -> float:
    """The most bytes held at any of the `moments` of `held`; sequences run over a rank's chunks."""
    return max(
        sum(h.whole * a + h.factors * b for h, a, b in zip(moment, activation_bytes, factor_bytes, strict=True))
        for moment in moments
    )


def activations_in_flight(
    schedule: ScheduleName,
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    factor_share: float = 1.0,
) -> float:
    """The most microbatches whose activations a rank holds at once, a chunk counting as its part of the rank.

    `factor_share` is how much of an activation is left while only weight gradients are to be made.
    """
    parts = [1 / virtual_stages] * virtual_stages
    moments = held(schedule, rank, num_ranks, num_microbatches, virtual_stages)
    return held_bytes(moments, parts, [factor_share * part for part in parts])
