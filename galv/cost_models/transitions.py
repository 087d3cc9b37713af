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

from galv.cost_models.network import Network
from galv.cost_models.unit import Degrees


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
    before: ActivationLayout, after: ActivationLayout, num_bytes: float, num_devices: int, network: Network
) -> tuple[float, float]:
    """(forward, backward) seconds of a microbatch between a unit that gives `before` and one that takes `after`.

    `num_bytes` is the whole activation, of all data-parallel groups together, on the `num_devices` of a stage.
    """
    if before == after:
        return 0.0, 0.0
    groups, wanted = num_devices // before.ranks, num_devices // after.ranks
    common = gcd(groups, wanted)
    forward = _gathered_seconds(before, groups, common, num_bytes, network)
    return forward, _gathered_seconds(after, wanted, common, num_bytes, network)


def _gathered_seconds(have: ActivationLayout, groups: int, common: int, num_bytes: float, network: Network) -> float:
    """Seconds to have the sequence whole, then the samples of `groups` together in `common` groups."""
    whole = network.seconds("all_gather", num_bytes / groups, stride=have.stride, size=have.parts)
    return whole + network.seconds("all_gather", num_bytes / common, stride=have.ranks, size=groups // common)
