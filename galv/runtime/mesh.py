"""Which ranks form which device mesh: tensor axis innermost (adjacent ranks), pipeline axis outermost.

Every unit's strategy looks up its own mesh over the whole world, so units that differ in every degree live side by
side. A process group is known by its size and by how far its ranks lie apart; each is made once, and meshes that have
such an axis share it.
"""

from __future__ import annotations

import math
import os
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galv.errors import RunError, UsageError
from galv.planner.plan import Plan, Strategy
from galv.runtime.regroup import Move, Peers
from galv.runtime.sequence_parallel import ContextRanks

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "tp")
"""Of the same ranks, with those of the data axes apart that share experts."""


class Meshes:
    """The device meshes of a plan, for the rank that makes this. Every rank must make it, as groups are collective."""

    def __init__(self, plan: Plan, device_type: str) -> None:
        self._device_type, self._num_stages = device_type, plan.pipeline.degree
        self._world, self._per_stage = plan.num_devices, plan.num_devices // plan.pipeline.degree
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._tensor: dict[int, DeviceMesh] = {}
        # All now, and in the plan's order: no rank may make groups that others do not.
        for unit in plan.units():
            self._tensor.setdefault(unit.strategy.tp, self.of(unit.strategy)["tp"])
            self.context(unit.strategy)
            if unit.strategy.ep > 1:
                self.experts(unit.strategy)
        for degree in plan.data_degrees:
            self.data_group(degree)
        for source, target in permutations(plan.data_degrees, 2):
            self.move(source, target)

    def of(self, strategy: Strategy) -> DeviceMesh:
        """The mesh of a unit's parameters, axes `AXES`; ranks of a context axis are data-parallel ones there."""
        strategy = without_context(strategy)
        return self._mesh(AXES, (self._num_stages, strategy.dp_replicate, strategy.dp_shard, strategy.tp))

    def experts(self, strategy: Strategy) -> DeviceMesh:
        """The mesh of a unit's experts, axes `EXPERT_AXES`: `ep` neighbouring data-parallel ranks share them."""
        shard = max(strategy.dp_shard // strategy.ep, 1)
        replicate = strategy.dp // (shard * strategy.ep)
        return self._mesh(EXPERT_AXES, (self._num_stages, replicate, shard, strategy.ep, strategy.tp))

    def _mesh(self, axes: tuple[str, ...], degrees: tuple[int, ...]) -> DeviceMesh:
        if degrees not in self._meshes:
            strides = [math.prod(degrees[axis + 1 :]) for axis in range(len(degrees))]
            groups = [self._group(size, stride) for size, stride in zip(degrees, strides, strict=True)]
            ranks = torch.arange(self._world).view(degrees)
            self._meshes[degrees] = DeviceMesh.from_group(groups, self._device_type, ranks, mesh_dim_names=axes)
        return self._meshes[degrees]

    def expert_data(self, strategy: Strategy) -> DeviceMesh:
        """The ranks that hold the same experts of a unit, for `fully_shard`; see `data`."""
        mesh = self.experts(strategy)
        return mesh["dp_replicate", "dp_shard"] if mesh.size(1) > 1 else mesh["dp_shard"]

    def data(self, strategy: Strategy) -> DeviceMesh:
        """The data axes of a unit, for `fully_shard`: dp_shard alone, or with dp_replicate where there are replicas."""
        mesh = self.of(strategy)
        return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]

    def context(self, strategy: Strategy) -> ContextRanks:
        """The context axis of a unit."""
        return ContextRanks(self._group(strategy.cp, strategy.tp), self._device_type)

    def tensor(self, degree: int) -> DeviceMesh:
        """The tensor axis of units with that degree."""
        return self._tensor[degree]

    # -- the pipeline axis

    @property
    def stage_index(self) -> int:
        """Which pipeline rank this is."""
        return dist.get_rank() // self._per_stage

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """This rank's peers on all stages."""
        return self._group(self._num_stages, self._per_stage)

    # -- the data axis of one degree

    def data_rank(self, degree: int) -> int:
        """Which of the `degree` groups that take different samples this rank is in."""
        return dist.get_rank() % self._per_stage // (self._per_stage // degree)

    def data_group(self, degree: int) -> dist.ProcessGroup:
        """The ranks that do the same as this one with other samples, where there are `degree` groups of samples."""
        return self._group(degree, self._per_stage // degree)

    def move(self, source: int, target: int) -> Move:
        """How this rank comes from the samples of its group among `source` to those of its group among `target`."""
        common = math.gcd(source, target)
        return Move(self._peers(source, common), self._peers(target, common))

    def _peers(self, degree: int, common: int) -> Peers | None:
        """The ranks that share out the samples of one of `common` groups, where there are `degree` groups."""
        size = degree // common
        return None if size == 1 else Peers(self._group(size, self._per_stage // degree), size)

    def _group(self, size: int, stride: int) -> dist.ProcessGroup:
        """This rank's group of `size` ranks that lie `stride` apart."""
        key = (size, 1 if size == 1 else stride)
        if key not in self._groups:
            self._groups[key] = self._made(*key)
        return self._groups[key]

    def _made(self, size: int, stride: int) -> dist.ProcessGroup:
        if size == self._world:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        ranks = torch.arange(self._world).view(-1, size, stride).transpose(1, 2).reshape(-1, size)
        own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        assert own is not None, "every rank is in one of them"
        return own


def without_context(strategy: Strategy) -> Strategy:
    """The strategy as parameters see it: ranks of the context axis are further data-parallel ranks.

    What is sharded is sharded over these as well.
    """
    axis = "dp_shard" if strategy.zero else "dp_replicate"
    sequence = strategy.sequence if strategy.cp == 1 else "none"
    degrees = {"cp": 1, axis: getattr(strategy, axis) * strategy.cp}
    return strategy.model_copy(update={**degrees, "sequence": sequence})


def join_world(plan: Plan, device: str | torch.device | None) -> torch.device:
    """The device of this rank, in a process group of the plan's world size.

    Joins the world that torchrun describes in the environment (or is a world of its own) when there is none yet.
    Raises RunError when the world size is not the plan's.
    """
    chosen = _choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        _initialize(chosen)
    world_size = dist.get_world_size()
    if world_size != plan.num_devices:
        raise RunError(
            f"the plan is for {plan.num_devices} devices ({plan.cluster.spec}), but this run has {world_size} "
            f"rank{'s' * (world_size != 1)}; start {plan.num_devices} ranks, or plan again for {world_size}"
        )
    return chosen


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        talks_cuda = not dist.is_initialized() or "nccl" in str(dist.get_backend())
        device = "cuda" if torch.cuda.is_available() and talks_cuda else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r}: galv runs on 'cpu' and 'cuda' devices")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return chosen


def _initialize(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
