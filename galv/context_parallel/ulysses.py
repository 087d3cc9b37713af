"""Attention with heads cut in place of the sequence (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galv.context_parallel.ranks import Ranks

HEADS, SEQUENCE = 1, 2


def ulysses_attention(
    general: Callable[..., Tensor],
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`general` attention over the whole sequence, of which every rank has one part in rank order.

    Tensors are (batch, heads, part of the sequence, size), `attn_mask` is of the whole sequence. Ranks exchange parts
    for heads and back, and attend with their heads. Where there are fewer key heads than ranks, they are repeated.
    """
    with torch._C.DisableTorchFunction():
        heads = query.shape[HEADS]
        repeats = _repeats(key.shape[HEADS], heads, ranks.size)
        query, key, value = (
            _to_heads(tensor.repeat_interleave(times, HEADS) if times > 1 else tensor, ranks)
            for tensor, times in ((query, 1), (key, repeats), (value, repeats))
        )
        if attn_mask is not None and attn_mask.ndim > HEADS + 1 and attn_mask.shape[-3] > 1:
            attn_mask = attn_mask.narrow(-3, ranks.rank * (heads // ranks.size), heads // ranks.size)
    out = general(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    with torch._C.DisableTorchFunction():
        return _to_sequence(out, ranks)


def _repeats(key_heads: int, query_heads: int, size: int) -> int:
    """How often each key head must be there, so that each rank gets the ones that its query heads look at."""
    if key_heads % size == 0:
        return 1
    return size // key_heads if size % key_heads == 0 else query_heads // key_heads


def _to_heads(tensor: Tensor, ranks: Ranks) -> Tensor:
    """From all heads of a part to the whole sequence of some heads."""
    moved = _Exchange.apply(tensor, ranks, HEADS, SEQUENCE)
    assert isinstance(moved, Tensor)
    return moved


def _to_sequence(tensor: Tensor, ranks: Ranks) -> Tensor:
    moved = _Exchange.apply(tensor, ranks, SEQUENCE, HEADS)
    assert isinstance(moved, Tensor)
    return moved


class _Exchange(torch.autograd.Function):
    """The all-to-all that cuts dim `cut` and joins dim `join`; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, cut: int, join: int) -> Tensor:
        ctx.ranks, ctx.cut, ctx.join = ranks, cut, join
        return _exchanged(tensor, ranks, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], ctx.ranks, ctx.join, ctx.cut), None, None, None


def _exchanged(tensor: Tensor, ranks: Ranks, cut: int, join: int) -> Tensor:
    parts = tensor.unflatten(cut, (ranks.size, -1)).movedim(cut, 0).contiguous()
    return ranks.exchange(parts).movedim(0, join).flatten(join, join + 1)
