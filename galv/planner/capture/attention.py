"""Calls the attention kernel that the target device would choose.

On the meta device `scaled_dot_product_attention` always takes the unfused path, whose score matrices no real run
holds. The choice made here follows `sdp_utils` of PyTorch's CUDA and CPU backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from galv.context_parallel import DeviceKind as DeviceKind
from galv.context_parallel import replaced_attention
from galv.context_parallel.kernels import MAX_FLASH_SIZE

aten = torch.ops.aten


@contextmanager
def fused_attention(device: DeviceKind) -> Iterator[None]:
    """Within, every `scaled_dot_product_attention` is the fused kernel of `device`, where it has one for the call."""

    def attend(general: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        out = _attend(device, *args, **kwargs)
        return general(*args, **kwargs) if out is None else out

    with replaced_attention(attend):
        yield


def _attend(
    device: DeviceKind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The output of the fused kernel, None where the device has none."""
    same_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    if query.ndim != 4 or not (same_heads or enable_gqa) or not (query.is_meta or isinstance(query, FakeTensor)):
        return None
    if device == "cpu":
        return _flash_on_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    same_dim = query.shape[-1] == value.shape[-1] <= MAX_FLASH_SIZE
    if is_half and attn_mask is None and same_dim:
        return _flash_on_cuda(query, key, value, dropout_p, is_causal, scale)
    return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale) if same_heads else None


def _flash_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    missing = -head_dim % 8
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :head_dim] if missing else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        mask = _additive(mask, query.dtype)
        missing = -mask.shape[-1] % 16
        if missing:
            mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    needs_backward = any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_backward, dropout, causal, scale=scale
    )[0]


def _flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor | None:
    if dropout > 0 or query.shape[-1] != value.shape[-1] or (mask is not None and mask.requires_grad):
        return None
    if mask is not None:
        mask = _additive(mask, query.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, attn_mask=mask, scale=scale
    )[0]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))
