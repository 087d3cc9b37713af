"""What one aten call costs: kind, bytes, FLOPs and shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from galv.planner.capture.trace import Recorder, Trace
from galv.planner.graph import Operator


def recorded(run: Callable[[], object]) -> list[Operator]:
    """The operators of a forward, without those that are free."""
    recorder = Recorder([], Trace())
    with recorder.forward():
        run()
    assert recorder.trace is not None
    return [op for op in recorder.trace.operators if op.kind != "view"]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


TABLE = meta(1000, 8)
IDS = meta(2, 5, dtype=torch.int64)

CALLS: list[tuple[str, Callable[[], object], str, int, int]] = [
    ("sum of two", lambda: meta(4, 8) + meta(4, 8), "memory", 256, 128),
    ("sum with a row", lambda: meta(4, 8) + meta(8), "memory", 160, 128),
    ("sum with an expanded row", lambda: meta(4, 8) + meta(8).expand(4, 8), "memory", 160, 128),
    ("square, one input twice", lambda: (lambda x: x * x)(meta(4, 8)), "memory", 128, 128),
    ("half of a tensor", lambda: meta(8, 8)[:4].exp(), "memory", 128, 128),
    ("cast", lambda: meta(4, 8).to(torch.bfloat16), "memory", 128, 64),
    ("embedding reads its rows", lambda: F.embedding(IDS, TABLE), "memory", 320 + 80, 320),
    ("copy reads its source", lambda: meta(4, 8).copy_(meta(4, 8)), "memory", 128, 128),
    ("add in place", lambda: meta(4, 8).add_(meta(4, 8)), "memory", 256, 128),
    ("zeros read nothing", lambda: torch.zeros_like(meta(4, 8)), "memory", 0, 128),
    ("product", lambda: meta(4, 8) @ meta(8, 16), "matmul", 128 + 512, 256),
]


@pytest.mark.parametrize("call, kind, read, written", [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_bytes_are_counted_once(call: Callable[[], object], kind: str, read: int, written: int) -> None:
    """Every input counts once as far as it lies in memory, and every fresh output or change."""
    (operator,) = recorded(call)
    assert (operator.kind, operator.bytes_read, operator.bytes_written) == (kind, read, written)


@pytest.mark.parametrize(
    "call",
    [
        lambda: meta(4, 8).t(),
        lambda: meta(4, 8).view(8, 4),
        lambda: meta(4, 8).contiguous(),
        lambda: meta(4, 8).detach(),
        lambda: torch.empty_like(meta(4, 8)),
        lambda: meta(4, 8).chunk(2),
    ],
    ids=["transpose", "view", "contiguous already", "detach", "allocation", "chunks"],
)
def test_views_and_allocations_are_free(call: Callable[[], object]) -> None:
    """What moves nothing is no work."""
    assert recorded(call) == []


@pytest.mark.parametrize(
    "call, shape, flops",
    [
        (lambda: meta(4, 8) @ meta(8, 16), (1, 4, 16, 8), 1024),
        (lambda: F.linear(meta(2, 3, 8), meta(16, 8), meta(16)), (1, 6, 16, 8), 1536),
        (lambda: meta(5, 4, 8) @ meta(5, 8, 16), (5, 4, 16, 8), 5120),
        (lambda: F.conv2d(meta(2, 3, 8, 8), meta(6, 3, 3, 3), padding=1), (1, 128, 6, 27), 2 * 128 * 6 * 27),
    ],
    ids=["mm", "addmm", "bmm", "conv"],
)
def test_products_have_a_shape(call: Callable[[], object], shape: tuple[int, int, int, int], flops: int) -> None:
    """(batch, m, n, k) of a product, of a convolution as it is after unfolding; FLOPs are 2 batch m n k."""
    (operator,) = [op for op in recorded(call) if op.kind == "matmul"]
    assert (operator.matmul, operator.flops) == (shape, flops)


def test_a_grouped_product_counts_each_row_once() -> None:
    """Experts' rows go through one matrix each, however many experts there are."""
    rows, experts = meta(64, 32, dtype=torch.bfloat16), meta(4, 32, 16, dtype=torch.bfloat16)
    (operator,) = recorded(lambda: torch.ops.aten._grouped_mm(rows, experts, meta(4, dtype=torch.int32)))
    assert (operator.matmul, operator.flops) == ((4, 16, 16, 32), 2 * 64 * 32 * 16)
