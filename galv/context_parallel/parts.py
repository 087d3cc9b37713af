"""The parts of a sequence that ranks hold, and how a tensor is brought to them and back, with its gradient.

Parameters are averaged over these ranks as over those with other samples, though every rank has but a part of their
gradient. So where the sequence is cut, gradients are as many times larger as there are ranks: they grow where the
sequence has been put together again, and shrink where it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from galv.context_parallel.ranks import Ranks
from galv.errors import RunError
from galv.planner.plan import Layout, SequenceCut, SequenceLayout


def own_part(tensor: Tensor, cut: SequenceCut, rank: int, dim: int | None = None) -> Tensor:
    """What `rank` holds of `tensor` along `dim` (by default the cut's), a view where possible.

    Raises RunError when the parts would not be equal.
    """
    dim = cut.dim if dim is None else dim
    length, rest = divmod(tensor.shape[dim], cut.degree * (1 + cut.balanced))
    if rest:
        raise RunError(
            f"context parallelism over {cut.degree} ranks cuts dim {dim} of a tensor of shape {tuple(tensor.shape)} "
            f"into {cut.degree * (1 + cut.balanced)} equal chunks, which its length does not allow; pad the inputs"
        )
    if not cut.balanced:
        return tensor.narrow(dim, rank * length, length)
    chunks = tensor.chunk(2 * cut.degree, dim)
    return torch.cat((chunks[rank], chunks[2 * cut.degree - 1 - rank]), dim)


def joined_parts(parts: Sequence[Tensor], cut: SequenceCut) -> Tensor:
    """The tensor of which the ranks hold `parts`."""
    if not cut.balanced:
        return torch.cat(list(parts), cut.dim)
    halves = [part.chunk(2, cut.dim) for part in parts]
    return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))], cut.dim)


def to_part(tensor: Tensor, cut: SequenceCut, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor that all have whole; its gradient is gathered, and shrinks."""
    part = _ToPart.apply(tensor, cut, ranks)
    assert isinstance(part, Tensor)
    return part


def to_whole(tensor: Tensor, cut: SequenceCut, ranks: Ranks) -> Tensor:
    """The whole of a tensor of which each rank has a part; its gradient, the same on all, is cut, and grows."""
    whole = _ToWhole.apply(tensor, cut, ranks)
    assert isinstance(whole, Tensor)
    return whole


def used(tensor: Tensor, ranks: Ranks) -> Tensor:
    """A tensor that all have whole, for use by each on its part of the sequence; gradients are summed, and shrink."""
    same = _Used.apply(tensor, ranks)
    assert isinstance(same, Tensor)
    return same


class _ToPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: SequenceCut, ranks: Ranks) -> Tensor:
        ctx.cut, ctx.ranks = cut, ranks
        return own_part(tensor, cut, ranks.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gathered = ctx.ranks.gather(grads[0].contiguous()).div_(ctx.ranks.size)
        return joined_parts(gathered.unbind(), ctx.cut), None, None


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: SequenceCut, ranks: Ranks) -> Tensor:
        ctx.cut, ctx.ranks = cut, ranks
        return joined_parts(ranks.gather(tensor.contiguous()).unbind(), cut)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return own_part(grads[0], ctx.cut, ctx.ranks.rank) * ctx.ranks.size, None, None


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.ranks.sum(grads[0] / ctx.ranks.size), None


def local_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout: SequenceLayout, ranks: Ranks
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments as this rank takes them, its activation as it is: that comes cut from the unit before."""

    def local(name: str, value: Any) -> Any:
        if name == layout.activation or name not in layout.arguments:
            return value
        return pytree.tree_map_only(Tensor, _localizer(iter(layout.arguments[name]), layout, ranks), value)

    return tuple(local(str(i), x) for i, x in enumerate(args)), {key: local(key, x) for key, x in kwargs.items()}


def _localizer(layouts: Iterator[Layout], layout: SequenceLayout, ranks: Ranks) -> Any:
    def localized(tensor: Tensor) -> Tensor:
        own = next(layouts, None)
        if own is None:
            raise RunError(
                f"a block of class {layout.unit_class} got more tensors than when it was planned; plan again"
            )
        if own.kind == "S":
            assert own.dim is not None
            return to_part(tensor, layout.cut_along(own.dim), ranks)
        return used(tensor, ranks) if own.kind == "R+" and tensor.requires_grad else tensor

    return localized
