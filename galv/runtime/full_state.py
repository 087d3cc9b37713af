"""Gathers a parallel model's full tensors under their original names, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from galv.planner.plan import Layout
from galv.runtime.recompute import original_name
from galv.runtime.tensor_parallel import REPLICATED, joined


def full_tensors(
    model: nn.Module, layouts: Mapping[str, Layout], stages: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer of the whole model by name, full, one at a time, alike on every rank.

    `model` is this rank's stage, `layouts` says by original name how its parameters are cut along the tensor axis
    where they are, and `stages` is the group of this rank's peers on all stages. Every rank must go through it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    own = own_state(model)
    for stage in range(dist.get_world_size(stages)):
        mine = stage == dist.get_rank(stages)
        for name, shape, dtype in _announced(own, stages, stage):
            full = full_tensor(own[name], layouts.get(name, REPLICATED)) if mine else None
            yield name, _from_stage(full, shape, dtype, stages, stage, next(iter(own.values())).device)


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of the parameters and persistent buffers of its stage, by original name."""
    return {original_name(name): tensor for name, tensor in _persistent(model)}


def full_tensor(tensor: Tensor, layout: Layout) -> Tensor:
    """The full tensor that `tensor` is this rank's part of; `layout` is how the tensor axis cuts it. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = tensor.device_mesh
    local = tensor.to_local().detach().to(mesh.device_type)  # offloaded ones lie elsewhere
    names = mesh.mesh_dim_names or ()
    shape = list(tensor.shape)
    if layout.kind == "S":
        assert layout.dim is not None
        shape[layout.dim] //= mesh["tp"].size()
    if "ep" in names:
        shape[0] //= mesh["ep"].size()
    if "dp_shard" in names:  # inside the other axes, as fully_shard cut it: possibly into unequal parts
        placement = tensor.placements[names.index("dp_shard")]
        local = _gathered(local, mesh["dp_shard"], getattr(placement, "dim", 0), shape)
    if "ep" in names:
        shape[0] = tensor.shape[0]
        local = _gathered(local, mesh["ep"], 0, shape)
    if layout.kind == "S":
        assert layout.dim is not None
        local = joined(_gathered(local, mesh["tp"], layout.dim, list(tensor.shape)), layout, mesh["tp"].size())
    return local


def _gathered(local: Tensor, mesh: DeviceMesh, dim: int, shape: list[int]) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)
    return sharded.full_tensor()


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield ".".join(filter(None, (prefix, name))), buffer


def _announced(own: Mapping[str, Tensor], stages: dist.ProcessGroup, stage: int) -> list[Any]:
    """The (name, shape, dtype) of every tensor of `stage`, known to all stages."""
    held: list[Any] = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()]]
    dist.broadcast_object_list(held, group=stages, group_src=stage)
    return list(held[0])


def _from_stage(
    full: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    stages: dist.ProcessGroup,
    stage: int,
    device: torch.device,
) -> Tensor:
    if full is None:
        full = torch.empty(shape, dtype=dtype, device=device)
    if dist.get_world_size(stages) > 1:
        full = full.contiguous()
        dist.broadcast(full, group=stages, group_src=stage)
    return full
