"""The global gradient norm and clipping by it, over every mesh and every pipeline stage.

Each distinct element counts once: what replicas hold alike, and tied copies on other stages, are not counted again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from galv.runtime.optimizer import by_mesh


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, total: Tensor) -> None:
    """Scales the gradients down in place so that their norm, now `total`, is at most `max_norm`."""
    for group in by_mesh(parameter for parameter in parameters if parameter.grad is not None):
        clip_grads_with_norm_(group, max_norm, total, foreach=True)


def total_norm(
    parameters: Iterable[nn.Parameter],
    *,
    copies: Iterable[nn.Parameter] = (),
    stages: dist.ProcessGroup | None = None,
    device: torch.device,
) -> Tensor:
    """The 2-norm of all gradients of the model, float32, alike on every rank.

    `parameters` are this rank's, `copies` those of them that another stage counts, and `stages` is the group of this
    rank's peers on all stages.
    """
    skipped = {id(parameter) for parameter in copies}
    parts: dict[tuple[tuple[int, ...], ...], tuple[list[dist.ProcessGroup], list[Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in skipped:
            groups = _shard_groups(parameter.grad)
            key = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            parts.setdefault(key, (groups, []))[1].append(_local(parameter.grad))
    total = torch.zeros((), device=device)
    for groups, gradients in parts.values():
        total += _sum_over(get_total_norm(gradients, foreach=True).to(device).float().square(), groups)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _shard_groups(gradient: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold different elements of `gradient`, one for each axis that it is sharded over."""
    if not isinstance(gradient, DTensor):
        return []
    mesh = gradient.device_mesh
    axes = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _sum_over(value: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        dist.all_reduce(value, group=group)
    return value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
