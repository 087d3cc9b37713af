"""Moves samples between units of different data-parallel degrees: gathered where the later unit has fewer groups, cut
where it has more, between ranks at the same place of each group.

Inside a unit of degree `d` a gradient is `d` times that of the whole batch's loss, for it is averaged over `d` groups
in the end. So a move also scales the gradient, from the degree of the later unit to that of the earlier one. All ranks
of a group hold the same activation and the same gradient: gathering forward is cutting backward and the reverse,
and nothing is summed. A value without a dim of samples is alike in all groups, or a mean over each group's samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The collective that gathers into one tensor, by its newer name where torch has that."""


@dataclass(frozen=True, eq=False)
class Peers:
    """Ranks that each hold another part of a group's samples, in order."""

    group: dist.ProcessGroup
    size: int


@dataclass(frozen=True, eq=False)
class Move:
    """From this rank's samples under one data-parallel degree to those under another; nothing to do for no peers."""

    gathers: Peers | None
    """Whose samples come together."""
    cuts: Peers | None
    """Who then share them out."""

    def __call__(self, value: Tensor, batch_dim: int | None, *, varies: bool = True) -> Tensor:
        """This rank's part of what `value` is over all groups, differentiable.

        Samples lie along `batch_dim`. Without one, `varies` says whether groups have different values, of which the
        mean is taken. Every rank of the groups must call it.
        """
        moved: Any = value
        if self.gathers is not None and batch_dim is not None:
            moved = _Gathered.apply(moved, batch_dim, self.gathers)
        elif self.gathers is not None and varies:
            moved = _Mean.apply(moved, self.gathers)
        if self.cuts is not None:
            moved = _Shared.apply(moved, self.cuts) if batch_dim is None else _Cut.apply(moved, batch_dim, self.cuts)
        assert isinstance(moved, Tensor)
        return moved


class _Gathered(torch.autograd.Function):
    """All peers' samples; the gradient, from fewer groups, is this rank's part of it and grows with their number."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        return gathered(part, dim, peers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_part(gradient, ctx.dim, ctx.peers) * ctx.peers.size, None, None


class _Cut(torch.autograd.Function):
    """This rank's part of the samples; the gradients, from more groups, come together and shrink with their number."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        return own_part(whole, dim, peers).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.dim, ctx.peers).div_(ctx.peers.size), None, None


class _Mean(torch.autograd.Function):
    """The mean of the peers' values; each counts for one of them, and the groups are fewer by as much."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: Peers) -> Tensor:
        return mean(value, peers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Shared(torch.autograd.Function):
    """The same value for all peers, whose gradients are averaged."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean(gradient, ctx.peers), None


def gathered(part: Tensor, dim: int, peers: Peers) -> Tensor:
    """The parts of all peers one after the other along `dim`, of any dtype."""
    part = part.contiguous()
    # As bytes: not every backend knows every type.
    own = part.reshape(-1).view(torch.uint8)
    found = torch.empty((peers.size * own.numel(),), dtype=torch.uint8, device=part.device)
    all_gather_single(found, own, group=peers.group)
    parts = found.view(part.dtype).view(peers.size, *part.shape)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def own_part(whole: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's equal part of `whole` along `dim`, a view."""
    length = whole.shape[dim] // peers.size
    return whole.narrow(dim, dist.get_rank(peers.group) * length, length)


def mean(value: Tensor, peers: Peers) -> Tensor:
    """The mean of the peers' values, a new tensor."""
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=peers.group)
    return total.div_(peers.size)
