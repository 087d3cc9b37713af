"""Collectives: units, symmetries, monotonicity, and how groups lie on nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.communication import Group, collective_seconds, mesh_group, p2p_seconds
from galv.planner.graph import CollectiveKind
from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.link import LinkProfile

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
RING_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
GB = 1e9

kinds = st.sampled_from(KINDS)
message_bytes = st.floats(1.0, 1e11)


def link(gigabytes_per_second: float, **changes: float | int) -> LinkProfile:
    """A link without latency and loss, but for the changes."""
    figures = {
        "bytes_per_second": gigabytes_per_second * GB,
        "efficiency": 1.0,
        "gather_efficiency": 1.0,
        "latency_seconds": 0.0,
        "base_seconds": 0.0,
        "devices_per_link": 1,
        **changes,
    }
    return LinkProfile(sources=dict.fromkeys(figures, "a test"), **figures)  # type: ignore[arg-type]


def cluster(intra: LinkProfile | None = None, inter: LinkProfile | None = None, shape: str = "8x4") -> ClusterProfile:
    """A cluster with ideal links of 100 GB/s inside and 10 GB/s between nodes, but for what is given."""
    changes = {"intra_node": intra or link(100.0), "inter_node": inter or link(10.0), "spec": f"test {intra} {inter}"}
    return load_cluster(f"h100-sxm-80:{shape}").model_copy(update=changes)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Groups with equally many members in each node of 8."""
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    num_nodes = draw(st.sampled_from([1, 2, 3, 4]))
    sharing = draw(st.integers(1, 8 // per_node))
    return Group(per_node * num_nodes, per_node, num_nodes, sharing if num_nodes > 1 else 1)


# ----------------------------------------------------------------------------------------------- seconds


@pytest.mark.parametrize("kind, share", [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8)])
def test_a_ring_moves_the_textbook_bytes(kind: CollectiveKind, share: float) -> None:
    """A full tensor of 8 GB over 8 devices at 100 GB/s takes 0.08 s times the share that each link carries."""
    seconds = collective_seconds(kind, 8 * GB, Group(8, 8), cluster())

    assert seconds == pytest.approx(0.08 * share)


def test_messages_and_exchanges_move_their_bytes() -> None:
    """A p2p message crosses once; an all-to-all keeps its own part at home."""
    assert collective_seconds("p2p", 1 * GB, Group(2, 2), cluster()) == pytest.approx(0.01)
    assert collective_seconds("all_to_all", 8 * GB, Group(8, 8), cluster()) == pytest.approx(0.07)


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    """For a large tensor the two halves of an all-reduce cost what they cost alone."""
    whole = collective_seconds("all_reduce", 8 * GB, Group(8, 8), cluster())
    halves = [collective_seconds(kind, 8 * GB, Group(8, 8), cluster()) for kind in RING_KINDS]

    assert whole == pytest.approx(sum(halves))


def test_small_messages_cost_their_hops() -> None:
    """A tiny all-gather takes 7 hops around the ring, a tiny all-reduce 2 x 3 up and down a tree, each a fixed time."""
    ideal = cluster(link(100.0, latency_seconds=1e-5, base_seconds=1e-3))

    assert collective_seconds("all_gather", 8, Group(8, 8), ideal) == pytest.approx(1e-3 + 7e-5)
    assert collective_seconds("all_reduce", 8, Group(8, 8), ideal) == pytest.approx(1e-3 + 6e-5)


def test_a_ring_passes_between_nodes_once_for_each_node() -> None:
    """The part that goes furthest leaves out a hop inside a node, or between nodes where there are no others."""
    far = cluster(inter=link(10.0, latency_seconds=1e-3), shape="8x8")
    times = [collective_seconds("all_gather", 1.0, Group(8 * n, 8, n), far) for n in (2, 4)]
    alone = collective_seconds("all_gather", 1.0, Group(4, 1, 4), far)

    assert times == pytest.approx([2e-3, 4e-3], rel=1e-3)
    assert alone == pytest.approx(3e-3, rel=1e-3)


def test_groups_of_a_node_share_its_network_cards() -> None:
    """One member a node: alone it has a card; if 8 groups share 8 cards too; if they share one card, an eighth."""
    alone, crowded = Group(4, 1, 4, 1), Group(4, 1, 4, 8)
    one_card = cluster(inter=link(10.0, devices_per_link=8))

    assert collective_seconds("all_gather", 4 * GB, alone, cluster()) == pytest.approx(0.3)
    assert collective_seconds("all_gather", 4 * GB, crowded, cluster()) == pytest.approx(0.3)
    assert collective_seconds("all_gather", 4 * GB, alone, one_card) == pytest.approx(0.3)
    assert collective_seconds("all_gather", 4 * GB, crowded, one_card) == pytest.approx(8 * 0.3)


def test_members_of_a_node_use_their_cards_together() -> None:
    """8 members a node bring 8 cards to one ring, until the links inside the node are the narrower ones."""
    slow_network = collective_seconds("all_gather", 16 * GB, Group(16, 8, 2, 1), cluster())
    fast_network = collective_seconds("all_gather", 16 * GB, Group(16, 8, 2, 1), cluster(inter=link(50.0)))

    assert slow_network == pytest.approx(15 / 80)
    assert fast_network == pytest.approx(15 / 100)


@given(kinds, message_bytes, groups())
def test_an_empty_or_lonely_collective_is_free(kind: CollectiveKind, num_bytes: float, group: Group) -> None:
    """No bytes or no partner, no time."""
    assert collective_seconds(kind, 0, group, cluster()) == 0
    assert collective_seconds(kind, num_bytes, Group(1, 1), cluster()) == 0


@given(kinds, message_bytes, st.floats(1.0, 10.0), groups())
def test_more_bytes_are_never_faster(kind: CollectiveKind, num_bytes: float, factor: float, group: Group) -> None:
    """Time grows with the message, and at most in proportion."""
    small, large = (collective_seconds(kind, n, group, cluster()) for n in (num_bytes, factor * num_bytes))

    assert small <= large * (1 + 1e-12)
    assert large <= factor * small * (1 + 1e-12)


@given(
    kinds,
    message_bytes,
    groups(),
    st.sampled_from(["intra_node", "inter_node"]),
    st.sampled_from(["bytes_per_second", "efficiency", "gather_efficiency", "latency_seconds", "base_seconds"]),
    st.floats(0.1, 1.0),
)
def test_a_better_link_is_never_slower(
    kind: CollectiveKind, num_bytes: float, group: Group, which: str, figure: str, share: float
) -> None:
    """More bandwidth, better use of it, or less latency of either link never makes a collective slower."""
    base = load_cluster("a100-sxm-40:8x4")
    usual = getattr(base, which)
    changed = usual.model_copy(update={figure: getattr(usual, figure) * share})
    before = collective_seconds(kind, num_bytes, group, base)
    after = collective_seconds(kind, num_bytes, group, base.model_copy(update={which: changed}))

    better, worse = (after, before) if figure.endswith("_seconds") else (before, after)
    assert better <= worse * (1 + 1e-12)


@given(message_bytes, st.integers(2, 4))
def test_crossing_nodes_is_never_faster_than_staying(num_bytes: float, size: int) -> None:
    """Members spread one a node over a slower network never beat the same members inside a node."""
    for kind in KINDS:
        near = collective_seconds(kind, num_bytes, Group(size, size), load_cluster("h100-sxm-80:8x4"))
        far = collective_seconds(kind, num_bytes, Group(size, 1, size, 8), load_cluster("h100-sxm-80:8x4"))

        assert near <= far


# ----------------------------------------------------------------------------------------------- groups on nodes


@pytest.mark.parametrize(
    "stride, size, expected",
    [
        (1, 1, Group(1, 1)),
        (1, 8, Group(8, 8)),
        (1, 4, Group(4, 4)),
        (2, 4, Group(4, 4)),
        (1, 16, Group(16, 8, 2, 1)),
        (1, 32, Group(32, 8, 4, 1)),
        (2, 16, Group(16, 4, 4, 2)),
        (4, 8, Group(8, 2, 4, 4)),
        (8, 4, Group(4, 1, 4, 8)),
        (16, 2, Group(2, 1, 2, 8)),
    ],
)
def test_axes_of_a_mesh_on_nodes_of_eight(stride: int, size: int, expected: Group) -> None:
    """How the groups of an axis lie on four nodes of 8, by its stride and size."""
    assert mesh_group(load_cluster("h100-sxm-80:8x4"), stride=stride, size=size) == expected


def test_node_borders_cut_the_worst_group() -> None:
    """With 6 devices a node, groups of 4 neighbours lie in one node or two; the one in two is described."""
    assert mesh_group(load_cluster("h100-sxm-80:6x2"), stride=1, size=4) == Group(4, 2, 2, 1)


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 4), st.data())
def test_groups_agree_with_counting_ranks(node: int, num_nodes: int, data: st.DataObject) -> None:
    """The description is that of a group found by listing all groups of the axis."""
    shape = load_cluster(f"h100-sxm-80:{node}x{num_nodes}")
    world = node * num_nodes
    stride = data.draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    rest = world // stride
    size = data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    listed = []
    for first in (r for r in range(world) if r // stride % size == 0):
        nodes = [(first + i * stride) // node for i in range(size)]
        listed.append((len(set(nodes)), -min(nodes.count(n) for n in set(nodes))))
    group = mesh_group(shape, stride=stride, size=size)

    assert (group.num_nodes, -group.per_node) == max(listed)
    assert 1 <= group.per_node_groups <= node


# ----------------------------------------------------------------------------------------------- pipeline transfers


def test_stages_inside_a_node_send_inside_it() -> None:
    """Two stages of 4 devices in one node never use the network; stages of whole nodes always do."""
    near, far = cluster(shape="8x1"), cluster(shape="8x4")

    assert p2p_seconds(1 * GB, 4, near) == pytest.approx(0.01)
    assert p2p_seconds(1 * GB, 8, far) == pytest.approx(0.1)


def test_the_slowest_boundary_counts_unless_one_is_asked_for() -> None:
    """With two stages a node every second boundary crosses nodes, and 4 senders find 8 cards."""
    stages = cluster(shape="8x4")

    assert [p2p_seconds(1 * GB, 4, stages, boundary=i) for i in (0, 1, 2)] == pytest.approx([0.01, 0.1, 0.01])
    assert p2p_seconds(1 * GB, 4, stages) == pytest.approx(0.1)


def test_senders_of_a_stage_share_the_cards_of_their_node() -> None:
    """All 8 devices of a node send through its single card."""
    stages = cluster(inter=link(10.0, devices_per_link=8))

    assert p2p_seconds(1 * GB, 8, stages) == pytest.approx(0.8)


def test_a_network_loses_rate_with_its_nodes() -> None:
    """With a decay of one half: 8 of 8 nodes reach half of what 2 of 2 reach, 2 of 8 what is between."""
    size = 2.0**40

    def loss(nodes: int, group: Group) -> float:
        """Times longer than without decay."""
        whole = load_cluster(f"a100-sxm-80:8x{nodes}")
        worn = whole.model_copy(update={"inter_node": whole.inter_node.model_copy(update={"node_decay": 0.5})})
        return collective_seconds("all_gather", size, group, worn) / collective_seconds(
            "all_gather", size, group, whole
        )

    assert loss(2, Group(16, 8, 2)) == 1.0
    assert loss(8, Group(64, 8, 8)) == pytest.approx(2.0, rel=0.01)
    assert loss(8, Group(16, 8, 2)) == pytest.approx(2.0**0.5, rel=0.01)


def test_small_groups_reach_their_share_of_the_links() -> None:
    """A pair of V100 has fewer links between its members than a node of 8; groups beyond the table reach all."""
    link = load_cluster("v100-sxm-32:8x1").intra_node

    assert link.group_share(2) < link.group_share(4) < link.group_share(8) == 1.0
    assert link.group_share(3) == link.group_share(4)
