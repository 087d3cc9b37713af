"""How long a collective takes on a group of devices.

The alpha-beta model: a collective costs a fixed time, a time per hop, and its bytes over the bandwidth of the
narrowest link it passes. Groups are described by how they lie on the nodes, not by their ranks.

Convention: `num_bytes` is the full tensor: the gathered result of an all-gather, the whole input of one rank for an
all-reduce, a reduce-scatter or an all-to-all, the message of a broadcast or a p2p transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, lcm, log2, sqrt

from galv.cost_models.readings import Ratios, place, ratio_at, ratios
from galv.planner.graph import CollectiveKind
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True, slots=True)
class Group:
    """How one communicating group lies on the nodes, and how many like it work at the same time."""

    size: int
    """Members."""
    per_node: int
    """Members in one node; where nodes hold different numbers, the smallest."""
    num_nodes: int = 1
    """Nodes that hold members."""
    per_node_groups: int = 1
    """Groups of the same axis that have members in one node: they share its network cards."""

    def __post_init__(self) -> None:
        assert 1 <= self.per_node * self.num_nodes <= self.size, self
        assert self.num_nodes > 1 or self.per_node == self.size, self


@lru_cache(maxsize=4096)
def mesh_group(cluster: ClusterProfile, *, stride: int, size: int) -> Group:
    """The groups of a mesh axis of `size` whose neighbouring members are `stride` ranks apart.

    Ranks fill the nodes in order, so the axes of a stage have the strides 1 (tensor), tp (dp_shard), tp * dp_shard
    (dp_replicate), and the pipeline the number of devices of a stage. All groups of the axis are taken to communicate
    at the same time. Where node borders cut the groups differently, the worst group is described: the one on the most
    nodes, then the one with the fewest members in some node.
    """
    assert min(stride, size) >= 1, (stride, size)
    node, span = cluster.devices_per_node, stride * size
    num_bases = min(cluster.num_devices // span, lcm(span, node) // span) or 1
    worst = Group(size, size)
    for base in range(0, num_bases * span, span):
        for offset in range(min(stride, node)):
            worst = max(worst, _group_at(base + offset, stride, size, node), key=lambda g: (g.num_nodes, -g.per_node))
    return worst


def _group_at(first: int, stride: int, size: int, node: int) -> Group:
    """The group of ranks `first`, `first + stride`, ... on nodes of `node` devices."""
    counts: dict[int, int] = {}
    for rank in range(first, first + stride * size, stride):
        counts[rank // node] = counts.get(rank // node, 0) + 1
    fewest = min(counts.values())
    return Group(size, fewest, len(counts), max(1, min(stride, ceil(node / fewest))))


def collective_seconds(kind: CollectiveKind, num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    """Seconds from the last member's call to the last member's result, nothing else running. 0 for a group of one.

    Rings for large messages, trees where the hops of a ring would cost more (all-reduce, broadcast). On several
    nodes a ring runs at the slower of the link inside the node and the network cards that the members of one node
    have together, as NCCL's multi-ring does.
    """
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    link = cluster.intra_node if group.num_nodes == 1 else cluster.inter_node
    curve = _curve_seconds(kind, num_bytes, group, cluster)
    if link.measured is None:
        return curve
    return curve * link.measured.scale * ratio_at(_link_ratios(kind, group, cluster), place(num_bytes))


def _curve_seconds(kind: CollectiveKind, num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    """`collective_seconds` by the links' rates alone."""
    link = cluster.intra_node if group.num_nodes == 1 else cluster.inter_node
    return link.base_seconds + _COLLECTIVES[kind](num_bytes, group, cluster)


@lru_cache(maxsize=4096)
def _link_ratios(kind: CollectiveKind, group: Group, cluster: ClusterProfile) -> Ratios:
    """Readings over curve by size, of the measured groups that are most like `group`; none where none was measured."""
    link = cluster.intra_node if group.num_nodes == 1 else cluster.inter_node
    assert link.measured is not None
    readings = [r for r in link.measured.collectives if r.kind == kind]
    if not readings:
        return ()

    def distance(size: int, num_nodes: int) -> float:
        return abs(log2(size / group.size)) + abs(log2(num_nodes / group.num_nodes))

    size, num_nodes = min({(r.size, r.num_nodes) for r in readings}, key=lambda shape: (distance(*shape), shape))
    like = Group(size, size // num_nodes, num_nodes)
    alike = (r for r in readings if (r.size, r.num_nodes) == (size, num_nodes))
    return ratios([(place(r.num_bytes), r.seconds, _curve_seconds(kind, r.num_bytes, like, cluster)) for r in alike])


def p2p_seconds(num_bytes: float, stride: int, cluster: ClusterProfile, *, boundary: int | None = None) -> float:
    """Seconds for all devices of a pipeline stage to send a message each to the stage after it.

    Stages are `stride` consecutive ranks; `boundary` 0 lies between the first two, None stands for the slowest.
    """
    return collective_seconds("p2p", num_bytes, _stage_border(cluster, stride, boundary), cluster)


@lru_cache(maxsize=4096)
def _stage_border(cluster: ClusterProfile, stride: int, boundary: int | None) -> Group:
    """A device and its partner `stride` ranks further: two nodes if those of any device of the stage lie apart."""
    node = cluster.devices_per_node
    stages = range(cluster.num_devices // stride - 1) if boundary is None else (boundary,)
    senders = (rank for stage in stages for rank in range(stage * stride, (stage + 1) * stride))
    if all(rank // node == (rank + stride) // node for rank in senders):
        return Group(2, 2)
    return Group(2, 1, 2, min(stride, node))


# ----------------------------------------------------------------------------------------------- bandwidth and hops


def _network_bytes_per_second(group: Group, cluster: ClusterProfile) -> float:
    """Nominal network bandwidth that the members of one group in one node have together.

    Each member reaches one card; all groups of the node together have no more than all its cards. Rates that fall with
    the number of nodes fall with the group's and with the whole job's, whose other groups send at the same time: by the
    geometric mean of both.
    """
    link = cluster.inter_node
    cards = min(float(group.per_node), cluster.links_per_node, cluster.links_per_node / group.per_node_groups)
    nodes = sqrt(group.num_nodes * max(group.num_nodes, cluster.num_nodes))
    decay = (2 / nodes) ** link.node_decay if nodes > 2 else 1.0
    return cards * link.bytes_per_second * decay


def _inside_bytes_per_second(cluster: ClusterProfile) -> float:
    """Nominal bandwidth of one device inside its node, all devices of the node at work."""
    return cluster.intra_node.bytes_per_second / cluster.intra_node.devices_per_link


def _ring_bytes_per_second(group: Group, cluster: ClusterProfile, *, gather: bool = False) -> float:
    """What a large message reaches: the narrowest link of the ring, at the share that the collective gets of it."""
    links = (cluster.intra_node, cluster.inter_node)
    share_inside, share_between = (x.gather_efficiency if gather else x.efficiency for x in links)
    inside = share_inside * _inside_bytes_per_second(cluster) * cluster.intra_node.group_share(group.per_node)
    if group.num_nodes == 1:
        return inside
    network = share_between * _network_bytes_per_second(group, cluster)
    return network if group.num_nodes == group.size else min(inside, network)


def _ring_hops_seconds(group: Group, cluster: ClusterProfile) -> float:
    """One way around the ring: size - 1 hops, of which those between nodes cost the network's latency.

    The ring passes between nodes once for each node, and the part that goes furthest leaves out one hop, inside a node
    where there is one.
    """
    alone = group.size == group.num_nodes
    between = 0 if group.num_nodes == 1 else group.num_nodes - alone
    inside = group.size - 1 - between
    return between * cluster.inter_node.latency_seconds + inside * cluster.intra_node.latency_seconds


def _tree_hops_seconds(group: Group, cluster: ClusterProfile) -> float:
    inside = ceil(log2(max(1, ceil(group.size / group.num_nodes))))
    between = ceil(log2(group.num_nodes))
    return between * cluster.inter_node.latency_seconds + inside * cluster.intra_node.latency_seconds


# ----------------------------------------------------------------------------------------------- collectives


def _ring_pass(num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    """All-gather or reduce-scatter: each rank passes on all parts but one."""
    moved = num_bytes * (group.size - 1) / group.size
    return _ring_hops_seconds(group, cluster) + moved / _ring_bytes_per_second(group, cluster, gather=True)


def _all_reduce(num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    """Twice around a ring, each time passing on all parts but one, or up and down a tree."""
    whole = num_bytes / _ring_bytes_per_second(group, cluster)
    ring = _ring_hops_seconds(group, cluster) + whole * (group.size - 1) / group.size
    return 2 * min(ring, _tree_hops_seconds(group, cluster) + whole)


def _broadcast(num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    return _tree_hops_seconds(group, cluster) + num_bytes / _ring_bytes_per_second(group, cluster)


def _p2p(num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    link = cluster.intra_node if group.num_nodes == 1 else cluster.inter_node
    return link.latency_seconds + num_bytes / _ring_bytes_per_second(group, cluster)


def _all_to_all(num_bytes: float, group: Group, cluster: ClusterProfile) -> float:
    """Each rank sends every other its part directly; parts for other nodes share the node's network cards."""
    part = num_bytes / group.size
    link = cluster.intra_node
    reached = _inside_bytes_per_second(cluster) * link.gather_efficiency * link.group_share(group.per_node)
    inside = part * (group.per_node - 1) / reached
    if group.num_nodes == 1:
        return cluster.intra_node.latency_seconds + inside
    each = _network_bytes_per_second(group, cluster) / group.per_node * cluster.inter_node.gather_efficiency
    return cluster.inter_node.latency_seconds + max(inside, part * (group.size - group.per_node) / each)


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _ring_pass,
    "reduce_scatter": _ring_pass,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "p2p": _p2p,
}
