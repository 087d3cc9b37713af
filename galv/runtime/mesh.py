"""Which ranks form which device mesh: tensor axis innermost (adjacent ranks), pipeline axis outermost.

Every unit's strategy looks up its own mesh over the whole world, so units whose data-parallel degrees split differently
into sharding and replication live side by side. Meshes with equal degrees are one mesh.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from galv.errors import RunError, UsageError
from galv.planner.plan import Plan, Strategy

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "dp_shard", "ep", "tp")
"""Of the same ranks, with those that share experts apart."""


class Meshes:
    """The device meshes of a plan, for the rank that makes this. Every rank must make it, as groups are collective."""

    def __init__(self, plan: Plan, device_type: str) -> None:
        strategy = plan.stages[0].units[0].strategy
        self._device_type, self._num_stages = device_type, plan.pipeline.degree
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.base = init_device_mesh(
            device_type, (plan.pipeline.degree, strategy.dp, strategy.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        """The axes that all units share: pipeline, data (replicated or sharded), tensor."""
        for unit in plan.units():  # now, and in the plan's order: no rank may make groups that others do not
            self.of(unit.strategy)
            if unit.strategy.ep > 1:
                self.experts(unit.strategy)

    def of(self, strategy: Strategy) -> DeviceMesh:
        """The mesh of a unit with axes `AXES`."""
        degrees = (self._num_stages, strategy.dp_replicate, strategy.dp_shard, strategy.tp)
        if degrees not in self._meshes:
            self._meshes[degrees] = init_device_mesh(self._device_type, degrees, mesh_dim_names=AXES)
        return self._meshes[degrees]

    def experts(self, strategy: Strategy) -> DeviceMesh:
        """The mesh of a unit's experts with axes `EXPERT_AXES`: `ep` neighbouring data-parallel ranks share them."""
        shard = max(strategy.dp_shard // strategy.ep, 1)
        replicate = strategy.dp // (shard * strategy.ep)
        degrees = (self._num_stages, replicate, shard, strategy.ep, strategy.tp)
        if degrees not in self._meshes:
            self._meshes[degrees] = init_device_mesh(self._device_type, degrees, mesh_dim_names=EXPERT_AXES)
        return self._meshes[degrees]

    def expert_data(self, strategy: Strategy) -> DeviceMesh:
        """The ranks that hold the same experts of a unit, for `fully_shard`; see `data`."""
        mesh = self.experts(strategy)
        return mesh["dp_replicate", "dp_shard"] if mesh.size(1) > 1 else mesh["dp_shard"]

    def data(self, strategy: Strategy) -> DeviceMesh:
        """The data axes of a unit, for `fully_shard`: dp_shard alone, or with dp_replicate where there are replicas."""
        mesh = self.of(strategy)
        return mesh["dp_replicate", "dp_shard"] if strategy.dp_replicate > 1 else mesh["dp_shard"]

    @property
    def stage_index(self) -> int:
        """Which pipeline rank this is."""
        return self.base.get_local_rank("pp")

    @property
    def data_rank(self) -> int:
        """Which of the groups that take different samples this rank is in."""
        return self.base.get_local_rank("dp")

    @property
    def data_degree(self) -> int:
        """How many groups take different samples."""
        return self.base.size(1)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that do the same as this one with other samples."""
        return self.base.get_group("dp")


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
