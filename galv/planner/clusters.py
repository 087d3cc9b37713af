"""Clusters of the same devices in another number."""

from __future__ import annotations

from collections.abc import Iterator

from galv.planner.space import divisors
from galv.profiles.cluster import MAX_DEVICES, ClusterProfile


def of_shape(cluster: ClusterProfile, devices_per_node: int, num_nodes: int) -> ClusterProfile:
    """`cluster` with so many devices and nodes. A cluster file keeps its name, as its other figures stay."""
    device, colon, _ = cluster.spec.rpartition(":")
    is_file = not colon or cluster.spec.endswith((".yaml", ".yml"))
    spec = cluster.spec if is_file else f"{device}:{devices_per_node}x{num_nodes}"
    shape = {"spec": spec, "devices_per_node": devices_per_node, "num_nodes": num_nodes}
    return cluster.model_copy(update=shape)


def with_nodes(cluster: ClusterProfile, num_nodes: int) -> Iterator[ClusterProfile]:
    """`cluster` with so many nodes; nothing where that is more than any cluster has."""
    if num_nodes * cluster.devices_per_node <= MAX_DEVICES:
        yield of_shape(cluster, cluster.devices_per_node, num_nodes)


def parts_of(cluster: ClusterProfile) -> tuple[ClusterProfile, ...]:
    """`cluster` and its parts: numbers of whole nodes, and of devices of one node, that divide what there is."""
    nodes, devices = cluster.num_nodes, cluster.devices_per_node
    shapes = [(d, 1) for d in divisors(devices)[:-1]] + [(devices, n) for n in divisors(nodes)]
    return tuple(of_shape(cluster, d, n) for d, n in shapes)
