"""Attention to keys and values that go round the ranks (Ring Attention, arXiv 2310.01889).

Each rank keeps its queries. At every step it attends to the part of the keys that it holds at the moment, while that
part is on its way to the next rank; what it has found is put together by the logs of the sums. In backward keys and
values go round once more, with their gradients behind them.

Balanced for causal attention, rank i of n holds chunks i and 2n-1-i of 2n, one of the first half and one of the
second, the earlier first (arXiv 2311.09431). Of a rank before it sees the first chunk, with both of its own; of a rank
behind it both, with its second alone; so all ranks do the same work at every step. With one chunk each, it sees all of
a rank before it and nothing of one behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galv.context_parallel.kernels import Kernel, Part, kernel_for
from galv.context_parallel.parts import own_part
from galv.context_parallel.ranks import Ranks
from galv.errors import RunError
from galv.planner.plan import SequenceCut

_SEQUENCE = -2


def ring_attention(
    ranks: Ranks,
    balanced: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention over the whole sequence, of which every rank has one part: chunks as above if `balanced`, else one.

    Tensors are (batch, heads, part of the sequence, size), `attn_mask` is of the whole sequence, boolean or additive.
    Raises RunError for a mask that wants a gradient.
    """
    if attn_mask is not None and attn_mask.requires_grad:
        raise RunError("ring attention gives no gradient to an attention mask; use sequence mode ulysses, or cp 1")
    is_plain = attn_mask is None and dropout_p == 0.0
    kernel = kernel_for(ranks.kind, query, value, is_plain=is_plain)
    ring = _Ring(
        ranks=ranks,
        balanced=balanced,
        causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        repeats=1 if kernel.groups_heads else query.shape[1] // key.shape[1],
        dropout=dropout_p,
        seed=int(torch.randint(2**62, (), device="cpu")) if dropout_p else 0,
        kernel=kernel,
    )
    out = _Attention.apply(query, key, value, attn_mask, ring)
    assert isinstance(out, Tensor)
    return out


@dataclass(frozen=True)
class _Step:
    """Which of this rank's queries see which of the keys that are here."""

    source: int
    """The rank whose keys they are."""
    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class _Ring:
    """One call of attention."""

    ranks: Ranks
    balanced: bool
    causal: bool
    scale: float
    repeats: int
    """How often the kernel must be given each key head."""
    dropout: float
    seed: int
    """Of dropout."""
    kernel: Kernel

    def round(self, packed: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's keys and values with that rank, beginning with our own, as they pass by."""
        for i in range(self.ranks.size):
            arrival = self.ranks.pass_on(packed) if i + 1 < self.ranks.size else None
            yield (self.ranks.rank - i) % self.ranks.size, packed
            if arrival is not None:
                packed = arrival()

    def step(self, source: int, num_queries: int, num_keys: int) -> _Step | None:
        """Who sees whom when the keys of `source` are here; None if nobody sees anything."""
        queries, keys = slice(0, num_queries), slice(0, num_keys)
        if self.causal and source > self.ranks.rank and not self.balanced:
            return None
        if self.causal and source < self.ranks.rank and self.balanced:
            keys = slice(0, num_keys // 2)
        elif self.causal and source > self.ranks.rank:
            queries = slice(num_queries // 2, num_queries)
        return _Step(source, queries, keys, self.causal and source == self.ranks.rank)

    def part(self, step: _Step, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Part:
        """What `step` computes."""
        query = query[..., step.queries, :]
        key, value = (_repeated(tensor[..., step.keys, :], self.repeats) for tensor in (key, value))
        bias, keep = self._bias(step.source, mask), self._keep(step, query, key)
        return Part(query, key, value, self.scale, step.causal, bias, keep)

    def _bias(self, source: int, mask: Tensor | None) -> Tensor | None:
        """What a mask over the whole sequence says of this rank's queries and the keys of `source`."""
        if mask is None:
            return None
        cut = SequenceCut(degree=self.ranks.size, dim=0, balanced=self.balanced)
        for dim, rank in ((mask.ndim - 2, self.ranks.rank), (mask.ndim - 1, source)):
            mask = own_part(mask, cut, rank, dim) if mask.shape[dim] > 1 else mask
        if mask.dtype != torch.bool:
            return mask
        zero = torch.zeros((), dtype=torch.float32, device=mask.device)
        return torch.where(mask, zero, zero - float("inf"))

    def _keep(self, step: _Step, query: Tensor, key: Tensor) -> Tensor | None:
        """The same at every time for one source, for backward has to drop what forward dropped."""
        if not self.dropout:
            return None
        shape = (*query.shape[:-1], key.shape[_SEQUENCE])
        if query.is_meta:
            return query.new_empty(shape)
        generator = torch.Generator(query.device).manual_seed((self.seed + step.source) % 2**63)
        drawn = torch.empty(shape, dtype=torch.float32, device=query.device)
        return drawn.bernoulli_(1 - self.dropout, generator=generator) / (1 - self.dropout)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        out = log_sum = query.new_empty(0)
        for source, packed in ring.round(_packed(key, value)):
            step = ring.step(source, query.shape[_SEQUENCE], key.shape[_SEQUENCE])
            if step is None:
                continue
            part_out, part_log = ring.kernel.forward(ring.part(step, query, *_unpacked(packed, key, value), mask))
            if source == ring.ranks.rank:
                # Copies, for what is joined to them is joined in place: selective recompute keeps what kernels return.
                out, log_sum = part_out.to(_wide_dtype(part_out), copy=True), part_log.clone()
            else:
                _join(out[..., step.queries, :], log_sum[..., step.queries], part_out, part_log)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, log_sum)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, out, log_sum = ctx.saved_tensors
        ring: _Ring = ctx.ring
        of_query = torch.zeros_like(query, dtype=_wide_dtype(query))
        behind = query.new_zeros(key.numel() + value.numel(), dtype=_wide_dtype(key))
        for source, packed in ring.round(_packed(key, value)):
            step = ring.step(source, query.shape[_SEQUENCE], key.shape[_SEQUENCE])
            if step is not None:
                part = ring.part(step, query, *_unpacked(packed, key, value), mask)
                given = (grads[0][..., step.queries, :], out[..., step.queries, :], log_sum[..., step.queries])
                part_query, part_key, part_value = ring.kernel.backward(given[0], part, *given[1:])
                of_query[..., step.queries, :] += part_query
                of_key, of_value = _unpacked(behind, key, value)
                of_key[..., step.keys, :] += _summed(part_key, ring.repeats)
                of_value[..., step.keys, :] += _summed(part_value, ring.repeats)
            # To the rank to which these keys go; after the last step, home.
            behind = ring.ranks.pass_on(behind)()
        of_key, of_value = _unpacked(behind, key, value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _join(out: Tensor, log_sum: Tensor, part_out: Tensor, part_log: Tensor) -> None:
    """Adds what one more part gives, in place; a query that has seen no key yet has a log of -inf."""
    total = torch.logaddexp(log_sum, part_log)
    before, after = ((log - total).exp().nan_to_num(0.0).unsqueeze(-1) for log in (log_sum, part_log))
    out.mul_(before).add_(part_out * after)
    log_sum.copy_(total)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _summed(gradient: Tensor, times: int) -> Tensor:
    return gradient if times == 1 else gradient.unflatten(1, (-1, times)).sum(2)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values in one message."""
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _unpacked(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors in a message, shaped like `key` and `value`."""
    first, second = packed.split((key.numel(), value.numel()))
    return first.view(key.shape), second.view(value.shape)
