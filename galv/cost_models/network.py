"""Collectives on the mesh axes of one cluster, each priced once: axes are said by their size and by how far the ranks
of a group lie apart."""

from __future__ import annotations

from galv.cost_models.communication import Group, collective_seconds, mesh_group
from galv.planner.graph import CollectiveKind
from galv.profiles.cluster import ClusterProfile


class Network:
    """The answers of `communication` for one cluster, remembered."""

    def __init__(self, cluster: ClusterProfile) -> None:
        self.cluster = cluster
        self._groups: dict[tuple[int, int], Group] = {}
        self._seconds: dict[tuple[CollectiveKind, float, int, int], float] = {}

    def group(self, *, stride: int, size: int) -> Group:
        """The groups of an axis, see `communication.mesh_group`."""
        key = (stride, size)
        if key not in self._groups:
            self._groups[key] = mesh_group(self.cluster, stride=stride, size=size)
        return self._groups[key]

    def seconds(self, kind: CollectiveKind, num_bytes: float, *, stride: int, size: int) -> float:
        """Seconds of a collective, see `communication.collective_seconds`."""
        if size <= 1 or num_bytes <= 0:
            return 0.0
        key = (kind, num_bytes, stride, size)
        found = self._seconds.get(key)
        if found is None:
            found = collective_seconds(kind, num_bytes, self.group(stride=stride, size=size), self.cluster)
            self._seconds[key] = found
        return found
