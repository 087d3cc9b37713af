"""Attention to one part of the keys, with the log of the sum by which parts are put together, and its backward.

torch's autograd hides that log, so the fused kernels are called by their own names. A kernel's backward is given output
and log of *all* parts, from which the probabilities of one part follow (FlashAttention-2, arXiv 2307.08691).
Tensors are (batch, heads, length, size), logs (batch, heads, length) in single precision at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from galv.context_parallel.ranks import DeviceKind

aten = torch.ops.aten
MAX_FLASH_SIZE = 256
"""Of a head."""
_FLASH_MULTIPLE = 8
_EFFICIENT_ROWS = 32
"""The memory-efficient kernel stores logs of so many rows at a time."""

Attended = tuple[Tensor, Tensor]
"""Output, and log of the sum of exponentials."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


@dataclass(frozen=True)
class Part:
    """Some keys as some queries see them."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False
    bias: Tensor | None = None
    """Added to the scores; -inf where a query does not see a key."""
    keep: Tensor | None = None
    """What dropout multiplies probabilities by."""


class Kernel(Protocol):
    """A way to compute `Part`s."""

    @property
    def groups_heads(self) -> bool:
        """Whether several query heads may look at one key head; else there is a key head for each."""
        ...

    def forward(self, part: Part) -> Attended:
        """Output and log of one part."""
        ...

    def backward(self, gradient: Tensor, part: Part, out: Tensor, log_sum: Tensor) -> Gradients:
        """Gradients of one part, from output and log of all."""
        ...


def kernel_for(kind: DeviceKind, query: Tensor, value: Tensor, *, is_plain: bool) -> Kernel:
    """The kernel for such tensors; `is_plain` when there is neither a mask nor dropout."""
    if not is_plain or query.shape[-1] != value.shape[-1]:
        return Written()
    if kind == "cpu":
        return FlashOnCpu()
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return FlashOnCuda() if is_half and query.shape[-1] <= MAX_FLASH_SIZE else Efficient()


class FlashOnCpu:
    """torch's flash attention for the CPU."""

    groups_heads = True

    def forward(self, part: Part) -> Attended:
        """See `Kernel`."""
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
            part.query, part.key, part.value, 0.0, part.causal, scale=part.scale
        )
        return out, log_sum

    def backward(self, gradient: Tensor, part: Part, out: Tensor, log_sum: Tensor) -> Gradients:
        """See `Kernel`."""
        query, key, value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, part.query, part.key, part.value, out, log_sum, 0.0, part.causal, scale=part.scale
        )
        return query, key, value


class FlashOnCuda:
    """FlashAttention-2 as torch has it, for half precision."""

    groups_heads = True

    def forward(self, part: Part) -> Attended:
        """See `Kernel`."""
        query, key, value = map(_padded, (part.query, part.key, part.value))
        out, log_sum = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, part.causal, False, scale=part.scale
        )[:2]
        return out[..., : part.query.shape[-1]], log_sum

    def backward(self, gradient: Tensor, part: Part, out: Tensor, log_sum: Tensor) -> Gradients:
        """See `Kernel`."""
        gradient, query, key, value, out = map(_padded, (gradient, part.query, part.key, part.value, out))
        unused = torch.empty((2,), dtype=torch.int64, device=query.device)
        lengths = (query.shape[-2], key.shape[-2])
        found = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, log_sum, None, None, *lengths, 0.0, part.causal, unused, unused,
            scale=part.scale,
        )  # fmt: skip
        first, second, third = (grad[..., : part.query.shape[-1]] for grad in found)
        return first, second, third


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % _FLASH_MULTIPLE
    return F.pad(tensor, (0, missing)) if missing else tensor


class Efficient:
    """The memory-efficient kernel of torch's CUDA backend, for every precision."""

    groups_heads = False

    def forward(self, part: Part) -> Attended:
        """See `Kernel`."""
        out, log_sum = aten._scaled_dot_product_efficient_attention(
            part.query, part.key, part.value, None, True, 0.0, part.causal, scale=part.scale
        )[:2]
        return out, log_sum[..., : part.query.shape[-2]]

    def backward(self, gradient: Tensor, part: Part, out: Tensor, log_sum: Tensor) -> Gradients:
        """See `Kernel`."""
        missing = -log_sum.shape[-1] % _EFFICIENT_ROWS
        log_sum = F.pad(log_sum, (0, missing), value=float("inf")) if missing else log_sum
        unused = torch.empty((), dtype=torch.int64, device=out.device)
        query, key, value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, part.query, part.key, part.value, None, out, log_sum, unused, unused, 0.0,
            [True, True, True, False], part.causal, scale=part.scale,
        )  # fmt: skip
        return query, key, value


class Written:
    """Attention written out, for what no fused kernel with a log takes: masks, dropout, values of another size."""

    groups_heads = False

    def forward(self, part: Part) -> Attended:
        """See `Kernel`."""
        scores = _scores(part)
        log_sum = torch.logsumexp(scores, -1)
        shares = _kept(_shares(scores, log_sum), part)
        return (shares @ part.value.to(shares.dtype)).to(part.query.dtype), log_sum

    def backward(self, gradient: Tensor, part: Part, out: Tensor, log_sum: Tensor) -> Gradients:
        """See `Kernel`."""
        shares = _shares(_scores(part), log_sum)
        wide = shares.dtype
        gradient, out, query, key, value = (
            tensor.to(wide) for tensor in (gradient, out, part.query, part.key, part.value)
        )
        of_shares = _kept(gradient @ value.mT, part)
        of_scores = shares * (of_shares - (gradient * out).sum(-1, keepdim=True)) * part.scale
        return of_scores @ key, of_scores.mT @ query, _kept(shares, part).mT @ gradient


def _scores(part: Part) -> Tensor:
    wide = torch.promote_types(part.query.dtype, torch.float32)
    scores = part.query.to(wide) @ part.key.to(wide).mT * part.scale
    if part.bias is not None:
        scores = scores + part.bias
    if part.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _shares(scores: Tensor, log_sum: Tensor) -> Tensor:
    """Probabilities; zero for a query that sees no key at all."""
    return torch.exp(scores - log_sum.unsqueeze(-1)).nan_to_num(0.0)


def _kept(shares: Tensor, part: Part) -> Tensor:
    return shares if part.keep is None else shares * part.keep
