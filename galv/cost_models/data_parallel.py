"""What the data axes of a unit cost: its states, and the collectives that keep parameters and gradients in step.

The levels are those of FSDP2 as the runtime applies it, unit by unit (ZeRO, arXiv 1910.02054; hybrid sharding: Zhao et
al., PyTorch FSDP, VLDB 2023):

    zero 0   gradients all-reduced over all data ranks at the last microbatch
    zero 1   parameters gathered once a step, gradients reduce-scattered at the last microbatch
    zero 2   parameters gathered once a step, gradients reduce-scattered at every microbatch
    zero 3   parameters gathered forward and backward of every microbatch, gradients as in 2

over the shard group; replicas of shards add an all-reduce of the shards at the last microbatch. Ranks of the context
axis see other tokens of the same parameters: they belong to the shard group, or to the replicas at zero 0. Experts that
are shared out have their own, smaller groups of data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import gcd

from galv.cost_models.compute import (
    CLIP_BYTES_PER_PARAMETER,
    UPDATE_BYTES_PER_PARAMETER,
    clip_seconds,
    optimizer_seconds,
)
from galv.cost_models.host import host_link_seconds, host_memory_seconds
from galv.cost_models.memory import FP32_BYTES, ModelStates, Passing, gathered_bytes, model_states, passing
from galv.cost_models.network import Network
from galv.cost_models.unit import Degrees, Outer, overlap_slowdown
from galv.planner.graph import CollectiveKind
from galv.planner.plan import Offload
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a unit's data ranks hold its states."""

    dp_shard: int = 1
    dp_replicate: int = 1
    zero: int = 0

    @property
    def dp(self) -> int:
        return self.dp_shard * self.dp_replicate


@dataclass(frozen=True, slots=True)
class DataCost:
    """Collectives of the data axes, each alone, and what a unit's states take. Seconds and bytes on one device."""

    forward_seconds: float
    """At every forward; so `backward_seconds`."""
    backward_seconds: float
    first_forward_seconds: float
    """At the step's first forward beside that; so `last_backward_seconds` at its last backward."""
    last_backward_seconds: float
    slowdown: float
    """Of these and computation while they run together."""
    update_seconds: float
    """Clipping and the optimizer."""
    states: ModelStates
    passing: Passing


def fits_together(degrees: Degrees, sharing: Sharing) -> bool:
    """Whether the experts' ranks are whole shard groups, or whole shard groups are the experts' ranks."""
    larger, smaller = max(degrees.ep, sharing.dp_shard), min(degrees.ep, sharing.dp_shard)
    return sharing.dp % degrees.ep == 0 and larger % smaller == 0


def data_cost(
    parameters: tuple[float, float],
    degrees: Degrees,
    sharing: Sharing,
    offload: tuple[Offload, ...],
    outer: Outer,
    network: Network,
    *,
    ddp: bool = False,
) -> DataCost:
    """What the data axes of a unit cost, with `parameters` (all, of which are experts') on one rank of its own axes.

    `ddp` says that DistributedDataParallel runs the whole plan, which computes with the masters themselves.
    """
    total, experts = parameters
    dense = _Part(total - experts, degrees, sharing, offload, outer, network, ddp)
    parts = [dense]
    if experts:
        own = Degrees(degrees.tp, degrees.sequence, degrees.cp, degrees.ep)
        parts.append(_Part(experts, own, sharing, offload, outer, network, ddp, is_expert=True))
    states = [part.states() for part in parts]
    return DataCost(
        forward_seconds=sum(part.forward_seconds() for part in parts),
        backward_seconds=sum(part.backward_seconds() for part in parts),
        first_forward_seconds=sum(part.first_forward_seconds() for part in parts),
        last_backward_seconds=sum(part.last_backward_seconds() for part in parts),
        slowdown=max(part.slowdown for part in parts),
        update_seconds=sum(part.update_seconds() for part in parts),
        states=ModelStates(
            parameters_bytes=sum(s.parameters_bytes for s in states),
            gradients_bytes=sum(s.gradients_bytes for s in states),
            optimizer_bytes=sum(s.optimizer_bytes for s in states),
        ),
        passing=reduce(Passing.plus, (part.passing() for part in parts)),
    )


@dataclass(frozen=True)
class _Part:
    """Parameters of a unit that share one set of data ranks: all but its experts, or its experts."""

    parameters: float
    degrees: Degrees
    sharing: Sharing
    offload: tuple[Offload, ...]
    outer: Outer
    network: Network
    ddp: bool
    is_expert: bool = False

    # -- groups

    @property
    def _ep(self) -> int:
        return self.degrees.ep if self.is_expert else 1

    @cached_property
    def shards(self) -> int:
        """Ranks that the states are cut over."""
        if not self.sharing.zero:
            return 1
        return self.degrees.cp * self.sharing.dp_shard // gcd(self._ep, self.sharing.dp_shard)

    @cached_property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.degrees.cp * self.sharing.dp // (self._ep * self.shards)

    @property
    def _stride(self) -> int:
        """Of the shard group. Experts of one rank lie `ep` data ranks further; then the context axis is passed over."""
        return self.degrees.tp if self._ep == 1 else self.degrees.num_ranks * self._ep

    @property
    def slowdown(self) -> float:
        size = self.shards if self.sharing.zero else self.replicas
        return overlap_slowdown(self.network.group(stride=self._stride, size=size), self.cluster.device)

    # -- time

    @property
    def _owned(self) -> float:
        return self.parameters / self.shards

    def _over_shards(self, kind: CollectiveKind, num_bytes: float) -> float:
        return self.network.seconds(kind, num_bytes, stride=self._stride, size=self.shards)

    @property
    def cluster(self) -> ClusterProfile:
        return self.network.cluster

    def _gather_seconds(self) -> float:
        """To have the parameters whole, from the host's memory where they lie there."""
        gather = self._over_shards("all_gather", self.gathered_bytes())
        return gather + (host_link_seconds(FP32_BYTES * self._owned, self.cluster) if self._on_host else 0.0)

    def _scatter_seconds(self) -> float:
        """To have the gradients reduced and cut, brought to the host's memory where they are to lie there."""
        scatter = self._over_shards("reduce_scatter", FP32_BYTES * self.parameters)
        return scatter + (host_link_seconds(FP32_BYTES * self._owned, self.cluster) if self._on_host else 0.0)

    @property
    def _on_host(self) -> bool:
        return "parameters" in self.offload

    def forward_seconds(self) -> float:
        return self._gather_seconds() if self.sharing.zero == 3 else 0.0

    def backward_seconds(self) -> float:
        scatter = self._scatter_seconds() if self.sharing.zero >= 2 else 0.0
        return scatter + self.forward_seconds()

    def first_forward_seconds(self) -> float:
        return self._gather_seconds() if self.sharing.zero in (1, 2) else 0.0

    def last_backward_seconds(self) -> float:
        scatter = self._scatter_seconds() if self.sharing.zero == 1 else 0.0
        between = self._stride * self.shards
        return scatter + self.network.seconds(
            "all_reduce", FP32_BYTES * self._owned, stride=between, size=self.replicas
        )

    def update_seconds(self) -> float:
        """Where the optimizer's state is on the host, it updates there while gradients and parameters pass by."""
        owned, optimizer, precision = self._owned, self.outer.optimizer, self.outer.precision
        if "optimizer" not in self.offload:
            device = self.cluster.device
            return optimizer_seconds(owned, optimizer, precision, device) + clip_seconds(owned, device)
        update = host_memory_seconds(UPDATE_BYTES_PER_PARAMETER[optimizer] * owned, self.cluster)
        if self._on_host:
            return update + host_memory_seconds(CLIP_BYTES_PER_PARAMETER * owned, self.cluster)
        return max(update, host_link_seconds(FP32_BYTES * owned, self.cluster)) + clip_seconds(
            owned, self.cluster.device
        )

    # -- bytes

    def gathered_bytes(self) -> float:
        return gathered_bytes(self.parameters, self.outer.precision)

    def passing(self) -> Passing:
        """What comes and goes on the device; masters on the host have their gradients there."""
        found = passing(
            self.parameters,
            zero=self.sharing.zero,
            dp_shard=self.shards,
            dp_replicate=self.replicas,
            precision=self.outer.precision,
            num_microbatches=self.outer.num_microbatches,
            ddp=self.ddp,
        )
        return replace(found, gradients_bytes=0.0) if self._on_host else found

    def states(self) -> ModelStates:
        """What of the states is on the device."""
        found = model_states(
            self.parameters,
            zero=self.sharing.zero,
            dp_shard=self.shards,
            dp_replicate=self.replicas,
            precision=self.outer.precision,
            optimizer=self.outer.optimizer,
            num_microbatches=self.outer.num_microbatches,
            ddp=self.ddp,
        )
        on_device = 0 if "optimizer" in self.offload else found.optimizer_bytes
        if self._on_host:
            # Zero 3: nothing but gathered parameters and gradients on their way, which are working bytes.
            return ModelStates(0, 0, on_device)
        return ModelStates(found.parameters_bytes, found.gradients_bytes, on_device)
