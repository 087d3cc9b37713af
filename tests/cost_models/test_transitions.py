"""Changes of layout between units: which all-gathers they are, and which are only slices."""

from __future__ import annotations

import pytest

from galv.cost_models.communication import collective_seconds, mesh_group
from galv.cost_models.network import Network
from galv.cost_models.transitions import ActivationLayout, transition_seconds
from galv.cost_models.unit import Degrees
from galv.profiles.cluster import load_cluster

CLUSTER = load_cluster("h100-sxm-80:8x2")
BYTES = 2.0**30


def layout(*degrees: object, is_block: bool = True) -> ActivationLayout:
    return ActivationLayout.of(Degrees(*degrees), is_block=is_block)  # type: ignore[arg-type]


def gather(num_bytes: float, *, stride: int, size: int) -> float:
    return collective_seconds("all_gather", num_bytes, mesh_group(CLUSTER, stride=stride, size=size), CLUSTER)


def seconds(before: ActivationLayout, after: ActivationLayout) -> tuple[float, float]:
    return transition_seconds(before, after, BYTES, 16, Network(CLUSTER))


@pytest.mark.parametrize(
    "before, after",
    [
        (layout(4, "none"), layout(4, "megatron", is_block=False)),
        (layout(4, "none"), layout(2, "none", 1)),
        (layout(2, "ulysses", 4), layout(2, "ring", 4)),
        (layout(4, "megatron"), layout()),
    ],
)
def test_the_gradient_goes_the_other_way(before: ActivationLayout, after: ActivationLayout) -> None:
    """Backward of a change is forward of the reverse change."""
    assert seconds(before, after) == seconds(after, before)[::-1]


def test_equal_layouts_cost_nothing() -> None:
    """Also where degrees differ that the activation does not show."""
    assert seconds(layout(4, "none"), layout(4, "megatron", is_block=False)) == (0.0, 0.0)
    assert seconds(layout(2, "ring", 4), layout(2, "ring", 4)) == (0.0, 0.0)


def test_a_cut_of_the_sequence_is_gathered_over_its_axis() -> None:
    """Into sequence-sharded blocks only gradients are gathered, out of them only activations."""
    whole, cut = layout(4, is_block=False), layout(4, "megatron")

    assert seconds(cut, whole) == (gather(BYTES / 4, stride=1, size=4), 0.0)
    context = layout(2, "ulysses", 4)
    assert seconds(context, layout(8, is_block=False)) == (gather(BYTES / 2, stride=2, size=4), 0.0)


def test_samples_are_gathered_from_groups_that_come_together() -> None:
    """From 16 data-parallel groups to 4, four neighbours' samples come together; the way back is a slice."""
    assert seconds(layout(), layout(4)) == (gather(BYTES / 4, stride=1, size=4), 0.0)


def test_samples_for_sequence_takes_gathers_in_both_directions() -> None:
    """Eight groups of whole sequences become one with cut ones: forward gathers samples, backward the sequence."""
    forward, backward = seconds(layout(), layout(1, "ulysses", 8))

    assert forward == gather(BYTES / 2, stride=1, size=8)
    assert backward == gather(BYTES / 2, stride=1, size=8)


def test_degrees_without_a_common_multiple_meet_in_the_middle() -> None:
    """Groups of 2 and of 3 ranks: samples come together in groups of 6 and are then cut."""
    cluster = load_cluster("h100-sxm-80:6x1")
    two, three = ActivationLayout(2), ActivationLayout(3)
    forward, backward = transition_seconds(two, three, BYTES, 6, Network(cluster))

    group = {size: mesh_group(cluster, stride=6 // size, size=size) for size in (2, 3)}
    assert forward == collective_seconds("all_gather", BYTES, group[3], cluster)
    assert backward == collective_seconds("all_gather", BYTES, group[2], cluster)
