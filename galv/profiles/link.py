"""What one kind of link can do, as collectives see it."""

from __future__ import annotations

from pydantic import Field

from galv.profiles.device import Figures, Rate, Seconds, Share
from galv.profiles.readings import LinkReadings


class LinkProfile(Figures):
    """One kind of link, as collectives see it. Bytes per second in one direction."""

    bytes_per_second: Rate
    """Between nodes: of one network card. Inside a node: of one device's links to all others together."""
    efficiency: Share
    """Share of `bytes_per_second` that a large all-reduce, broadcast or p2p transfer reaches."""
    gather_efficiency: Share
    """The same for all-gather, reduce-scatter and all-to-all as torch runs them: with copies in and out of buffers."""
    latency_seconds: Seconds
    """Added by each hop of a ring or tree."""
    base_seconds: Seconds
    """Added by each collective, whatever its size and group."""
    node_decay: float = Field(0.0, ge=0, le=1)
    """Between nodes: a group on n > 2 nodes, all of the job's, reaches (2 / n) to this power of the rate."""
    group_shares: dict[int, Share] = Field(default_factory=dict)
    """Inside a node: what groups of so many devices reach of the rate; larger ones reach all of it."""
    devices_per_link: int = Field(ge=1)
    """Devices that share one such link: 1 where every device has its own, 8 for one network card in a node of 8."""
    measured: LinkReadings | None = None
    """Collectives as they were timed; they win over the figures above."""

    def __hash__(self) -> int:
        return hash((self.bytes_per_second, self.efficiency, self.latency_seconds, self.base_seconds))

    def group_share(self, num_devices: int) -> float:
        """What a group of `num_devices` in one node reaches of the rate."""
        return self.group_shares.get(min((n for n in self.group_shares if n >= num_devices), default=0), 1.0)
