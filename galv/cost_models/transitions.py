"""What it costs that neighbouring units lay the activation between them differently on the devices of their stage.

A layout says which samples a rank holds (each of `dp` groups of neighbouring ranks has consecutive ones) and whether
the sequence is cut, over the tensor axis (`megatron`) or the context axis. The runtime redistributes in front of the
later unit in three steps: the sequence is made whole, by an all-gather over the axis that cuts it; samples are gathered
from groups that come together, by an all-gather between ranks at the same place of each group; and every rank cuts out
what it is to have, which costs nothing here. The gradient goes back the same way in the other direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from galv.cost_models.communication import collective_seconds, mesh_group
from galv.cost_models.unit import Degrees
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """How the activation of a unit lies on its stage's devices."""

    ranks: int
    """That hold the same samples, or parts of them."""
    cut: Literal["whole", "megatron", "ulysses", "ring"] = "whole"
    parts: int = 1
    """That the sequence is cut into, on ranks that lie `stride` apart."""
    stride: int = 1

    @classmethod
    def of(cls, degrees: Degrees, *, is_block: bool) -> ActivationLayout:
        """The layout that a unit takes and gives; what stands around the blocks has whole sequences."""
        if not is_block or degrees.sequence == "none":
            return cls(degrees.num_ranks)
        if degrees.sequence == "megatron":
            return cls(degrees.tp, "megatron", degrees.tp)
        return cls(degrees.num_ranks, degrees.sequence, degrees.cp, degrees.tp)


def transition_seconds(
    before: ActivationLayout, after: ActivationLayout, num_bytes: float, num_devices: int, cluster: ClusterProfile
) -> tuple[float, float]:
    """(forward, backward) seconds of a microbatch between a unit that gives `before` and one that takes `after`.

    `num_bytes` is the whole activation, of all data-parallel groups together, on the `num_devices` of a stage.
    """
    return (
        _seconds(before, after, num_bytes, num_devices, cluster),
        _seconds(after, before, num_bytes, num_devices, cluster),
    )


def _seconds(
    have: ActivationLayout, need: ActivationLayout, num_bytes: float, num_devices: int, cluster: ClusterProfile
) -> float:
    if have == need:
        return 0.0
    groups, wanted = num_devices // have.ranks, num_devices // need.ranks
    common = gcd(groups, wanted)
    over_sequence = mesh_group(cluster, stride=have.stride, size=have.parts)
    over_samples = mesh_group(cluster, stride=have.ranks, size=groups // common)
    whole = collective_seconds("all_gather", num_bytes / groups, over_sequence, cluster)
    return whole + collective_seconds("all_gather", num_bytes / common, over_samples, cluster)
