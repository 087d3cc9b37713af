"""Attention whose sequence lies on several ranks gives what attention on one gives, with every gradient."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from galv.context_parallel import local_arguments, replaced_attention
from galv.context_parallel.kernels import Efficient, FlashOnCuda, Part, Written, kernel_for
from galv.context_parallel.parts import own_part
from galv.context_parallel.ring import ring_attention
from galv.context_parallel.ulysses import ulysses_attention
from galv.errors import RunError
from galv.planner.plan import Layout, SequenceCut, SequenceLayout
from tests.context_parallel.threads import ThreadRank, on_ranks

SIZES = (2, 3, 4)
LENGTH = 24


@dataclass(frozen=True)
class Case:
    """Attention of some kind."""

    heads: int = 12
    key_heads: int = 12
    size: int = 8
    value_size: int = 8
    causal: bool = False
    mask: str = ""
    balanced: bool = False
    scale: float | None = None

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.heads, self.size), (self.key_heads, self.size), (self.key_heads, self.value_size)]
        shapes.append((self.heads, self.value_size))
        return [torch.randn(2, heads, LENGTH, size, generator=generator) for heads, size in shapes]

    def attn_mask(self) -> Tensor | None:
        """Padding that hides all that one rank has from a sample, or a bias for every head."""
        if self.mask == "padding":
            return (torch.arange(LENGTH) < torch.tensor([[5], [LENGTH]])).view(2, 1, 1, LENGTH)
        if self.mask == "bias":
            return torch.randn(1, self.heads, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
        return None

    def expected(self) -> list[Tensor]:
        """Output and gradients of one device."""
        query, key, value, gradient = self.tensors()
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = F.scaled_dot_product_attention(query, key, value, **self.options())
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def options(self) -> dict[str, Any]:
        """The keywords of attention."""
        gqa = self.heads != self.key_heads
        return {"attn_mask": self.attn_mask(), "is_causal": self.causal, "scale": self.scale, "enable_gqa": gqa}


CASES = {
    "full": Case(),
    "causal": Case(causal=True, balanced=True),
    "causal in one chunk each": Case(causal=True),
    "grouped causal": Case(key_heads=3, causal=True, balanced=True, scale=0.5),
    "few key heads": Case(key_heads=1),
    "padding": Case(mask="padding"),
    "bias": Case(mask="bias", key_heads=6),
    "bias in two chunks each": Case(mask="bias", balanced=True),
    "wide values": Case(value_size=16, causal=True, balanced=True),
}


def order(size: int, *, balanced: bool) -> list[Tensor]:
    """The positions that each rank holds."""
    chunks = torch.arange(LENGTH).chunk(2 * size if balanced else size)
    if not balanced:
        return list(chunks)
    return [torch.cat((chunks[i], chunks[2 * size - 1 - i])) for i in range(size)]


def run(case: Case, rank: ThreadRank, mode: str) -> list[Tensor]:
    """Output and gradients of one rank's part."""
    balanced = case.balanced and mode == "ring"
    own = order(rank.size, balanced=balanced)[rank.rank]
    query, key, value, gradient = (tensor[:, :, own] for tensor in case.tensors())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    if mode == "ring":
        out = ring_attention(rank, balanced, query, key, value, **case.options())
    else:
        out = ulysses_attention(F.scaled_dot_product_attention, rank, query, key, value, **case.options())
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_equals_one_device(mode: str, name: str, size: int) -> None:
    """Output, and gradients of query, key and value, part by part."""
    case = CASES[name]
    parts = on_ranks(size, lambda rank: run(case, rank, mode))
    positions = torch.cat(order(size, balanced=case.balanced and mode == "ring")).argsort()
    for expected, own in zip(case.expected(), zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(own, 2)[:, :, positions], expected, rtol=1e-4, atol=1e-5)


def test_ring_drops_the_same_in_backward_and_keeps_the_mean() -> None:
    """The output is linear in the values, so values times their gradient sum to output times its gradient."""

    def task(rank: ThreadRank) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(rank.rank)
        query, key, value, gradient = (t[:, :, order(rank.size, balanced=False)[rank.rank]] for t in Case().tensors())
        value.requires_grad_()
        out = ring_attention(rank, False, query, key, value, dropout_p=0.5)
        (of_value,) = torch.autograd.grad(out, [value], gradient)
        return (out * gradient).sum().detach(), (value * of_value).sum().detach(), out.detach()

    results = on_ranks(2, task)
    torch.testing.assert_close(sum(r[0] for r in results), sum(r[1] for r in results), rtol=1e-4, atol=1e-4)
    out = torch.cat([r[2] for r in results], 2)
    assert not torch.allclose(out, Case().expected()[0], atol=1e-2)


def test_ring_refuses_masks_that_are_trained() -> None:
    """Their gradient would have to go round as well."""
    mask = torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True)
    query, key, value, _ = Case().tensors()
    with pytest.raises(RunError, match="ulysses"):
        ring_attention(ThreadRank(0, 1, defaultdict(queue.Queue)), False, query, key, value, attn_mask=mask)


@pytest.mark.parametrize("kernel", [FlashOnCuda(), Efficient()])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_gpus_are_called_as_torch_declares_them(kernel: FlashOnCuda | Efficient, causal: bool) -> None:
    """Shapes on the meta device, forward and backward, with a head size that has to be padded."""
    query = torch.empty(2, 4, 40, 12, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2 if kernel.groups_heads else 4, 40, 12, dtype=torch.bfloat16, device="meta")
    part = Part(query, key, key, 0.3, causal)
    out, log_sum = kernel.forward(part)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (query.shape, query.shape[:-1], torch.float32)
    gradients = kernel.backward(torch.empty_like(out), part, out, log_sum)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


def test_the_kernel_goes_by_device_and_kind() -> None:
    """Flash for half precision on GPUs, the memory-efficient one for the rest, none with a mask."""
    half, single = (torch.empty(1, 1, 1, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert isinstance(kernel_for("cuda", half, half, is_plain=True), FlashOnCuda)
    assert isinstance(kernel_for("cuda", single, single, is_plain=True), Efficient)
    assert isinstance(kernel_for("cuda", half, half, is_plain=False), Written)


def test_attention_is_replaced_once() -> None:
    """Whether it is called by torch's name or by one taken before, and what replaces it may call it."""
    seen: list[str] = []
    taken = F.scaled_dot_product_attention

    def attend(general: Callable[..., Tensor], *args: Tensor) -> Tensor:
        seen.append("called")
        return general(*args)

    query, key, value, _ = Case().tensors()
    with replaced_attention(attend):
        F.scaled_dot_product_attention(query, key, value)
        taken(query, key, value)
    F.scaled_dot_product_attention(query, key, value)
    assert seen == ["called"] * 2


# ----------------------------------------------------------------------------------------------- arguments


def test_parts_must_be_equal() -> None:
    """A sequence of another length than was planned for is refused, not cut short."""
    cut = SequenceCut(degree=2, dim=1, balanced=True)
    with pytest.raises(RunError, match="into 4 equal chunks"):
        own_part(torch.zeros(1, 6, 2), cut, 0)


def test_arguments_are_cut_where_the_layout_says() -> None:
    """A table whose gradient is wanted is cut and gathered, what each rank uses whole gets the sum of gradients.

    Both shrink by the number of ranks, over which the gradients of parameters will be averaged.
    """
    layouts = {"0": (Layout(kind="S", dim=1),), "tables": (Layout(kind="S", dim=0), Layout(kind="R+"))}
    layout = SequenceLayout(
        unit_class="block", mode="ring", degree=2, balanced=True, arguments=layouts, activation="0", output_dim=1
    )

    def task(rank: ThreadRank) -> list[Tensor]:
        table = torch.arange(8.0).requires_grad_()
        other = torch.ones(3, requires_grad=True)
        activation = torch.zeros(1, 4)
        args, kwargs = local_arguments((activation,), {"tables": (table, other), "more": table}, layout, rank)
        assert args[0] is activation
        assert kwargs["more"] is table
        part, whole = kwargs["tables"]
        gradients = torch.autograd.grad((part * (rank.rank + 1)).sum() + whole.sum(), [table, other])
        return [part.detach(), *gradients]

    for rank, (part, of_table, of_other) in enumerate(on_ranks(2, task)):
        assert part.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert of_table.tolist() == [0.5, 0.5, 1, 1, 1, 1, 0.5, 0.5]
        assert of_other.tolist() == [1, 1, 1]
