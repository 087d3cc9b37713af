"""What it costs that neighbouring units lay the activation between them differently on the devices of their stage.

Ranks count through the tensor axis first, then the context axis, then the data axes. A layout says which samples and
which part of the sequence a rank holds: data ranks hold consecutive samples, the context axis cuts the sequence (under
`ring` into two chunks a rank, so that causal attention is balanced), and so does the tensor axis under `megatron`.
The runtime redistributes in front of the later unit, forward the activation, backward its gradient. Whoever holds all
that is asked of him only slices; what he lacks he gets from the ranks of the smallest block of consecutive ranks that
holds the same samples under both layouts, in one all-gather where each gets all of the block, else in an all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from galv.cost_models.communication import collective_seconds, mesh_group
from galv.cost_models.unit import Degrees
from galv.profiles.cluster import ClusterProfile

_SLICED = 1e-12
"""Shares of a block's activation below this are rounding."""


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """How the activation of a unit lies on its stage's devices."""

    ranks: int
    """That hold the same samples, or parts of them."""
    parts: int = 1
    """That the sequence is cut into, over neighbouring ranks or rank groups."""
    is_balanced: bool = False
    """Whether part i of n is the chunks i and 2n - 1 - i of 2n."""

    @classmethod
    def of(cls, degrees: Degrees, *, is_block: bool) -> ActivationLayout:
        """The layout that a unit takes and gives; what stands around the blocks holds whole sequences."""
        if degrees.cp > 1:
            return cls(degrees.num_ranks, degrees.cp, degrees.sequence == "ring")
        return cls(degrees.tp, degrees.tp if is_block and degrees.sequence == "megatron" else 1)

    def share(self, num_devices: int) -> float:
        """The share of a microbatch's activation, of all data-parallel groups together, that one device holds."""
        return self.ranks / (self.parts * num_devices)

    def samples(self, rank: int, block: int) -> tuple[float, float]:
        """Which samples of a block of ranks one of them holds, as a range within 0 to 1."""
        groups = block // self.ranks
        group = rank // self.ranks
        return group / groups, (group + 1) / groups

    def sequence(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Which ranges of the sequence a rank holds."""
        n = self.parts
        part = rank % self.ranks // (self.ranks // n)
        if not self.is_balanced:
            return ((part / n, (part + 1) / n),)
        return tuple((chunk / (2 * n), (chunk + 1) / (2 * n)) for chunk in (part, 2 * n - 1 - part))


@lru_cache(maxsize=1 << 14)
def _missing(have: ActivationLayout, need: ActivationLayout) -> tuple[int, float]:
    """(ranks of the block, the largest share of the block's activation that one of them lacks)."""
    block = lcm(have.ranks, need.ranks)
    needed = need.ranks / (need.parts * block)
    most = max(needed - _shared(have, need, rank, block) for rank in range(block))
    return block, most if most > _SLICED else 0.0


def _shared(have: ActivationLayout, need: ActivationLayout, rank: int, block: int) -> float:
    """The share of the block's activation that `rank` both has and needs."""
    samples = _common(have.samples(rank, block), need.samples(rank, block))
    return samples * sum(_common(a, b) for a in have.sequence(rank) for b in need.sequence(rank))


def _common(a: tuple[float, float], b: tuple[float, float]) -> float:
    return max(min(a[1], b[1]) - max(a[0], b[0]), 0.0)


def _seconds(
    have: ActivationLayout, need: ActivationLayout, num_bytes: float, num_devices: int, cluster: ClusterProfile
) -> float:
    block, missing = _missing(have, need)
    if not missing:
        return 0.0
    whole = num_bytes * block / num_devices
    group = mesh_group(cluster, stride=1, size=block)
    if need.ranks == block and need.parts == 1:
        return collective_seconds("all_gather", whole, group, cluster)
    # All-to-all of x bytes a rank brings it x (block - 1) / block from the others.
    return collective_seconds("all_to_all", whole * missing * block / (block - 1), group, cluster)


def transition_seconds(
    before: ActivationLayout, after: ActivationLayout, num_bytes: float, num_devices: int, cluster: ClusterProfile
) -> tuple[float, float]:
    """(forward, backward) seconds of a microbatch between a unit that gives `before` and one that takes `after`.

    `num_bytes` is the whole activation, of all data-parallel groups together, on the `num_devices` of a stage.
    """
    if before == after:
        return 0.0, 0.0
    return (
        _seconds(before, after, num_bytes, num_devices, cluster),
        _seconds(after, before, num_bytes, num_devices, cluster),
    )
