"""What the host lends to its devices: memory over the link between them, and an optimizer that runs there.

Used where a strategy offloads (ZeRO-Offload, arXiv 2101.06840). A device has its own link to the host; the memory of a
host is shared by the devices of its node.
"""

from __future__ import annotations

from functools import lru_cache

from galv.cost_models.readings import Ratios, place, ratio_at, ratios
from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile

HOST_LINK_BYTES_PER_SECOND = 24e9
"""One direction of the link, pinned memory: PCIe 4.0 x16 (31.5 GB/s less packet overhead), as nodes of A100 have it;
those of H100 (PCIe 5.0 x16) are up to twice as quick."""
HOST_MEMORY_BYTES_PER_SECOND = 250e9
"""A node's memory bandwidth that an update reaches: two sockets with 8 channels of DDR4-3200 have 410 GB/s, of which
STREAM triad reaches about 60 %."""


def host_link_seconds(num_bytes: float, cluster: ClusterProfile) -> float:
    """Seconds to copy `num_bytes` from one device to its host's memory or back, as measured where that was done."""
    device = cluster.device
    if device.kind != "cuda" or num_bytes <= 0:
        return 0.0
    seconds = num_bytes / HOST_LINK_BYTES_PER_SECOND
    return seconds if device.measured is None else seconds * ratio_at(_copy_ratios(device), place(num_bytes))


@lru_cache
def _copy_ratios(device: DeviceProfile) -> Ratios:
    """Measured copies to the host and back over the nominal rate; the slower of the two where both have a size."""
    assert device.measured is not None
    slowest: dict[float, float] = {}
    for reading in device.measured.traffic:
        if reading.kind in ("to_host", "to_device"):
            slowest[reading.num_bytes] = max(slowest.get(reading.num_bytes, 0.0), reading.seconds)
    return ratios([(place(size), read, size / HOST_LINK_BYTES_PER_SECOND) for size, read in slowest.items()])


def host_memory_seconds(num_bytes: float, cluster: ClusterProfile) -> float:
    """Seconds of work on the host that moves `num_bytes`, done for all devices of the node at the same time."""
    return num_bytes * cluster.devices_per_node / HOST_MEMORY_BYTES_PER_SECOND
