"""Which attention kernel a call becomes, against what torch really dispatches to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from galv.planner.capture.attention import DeviceKind, fused_attention


class Names(TorchDispatchMode):
    """The operators called within, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def called(
    device: str, kind: DeviceKind, heads: int = 4, dtype: torch.dtype = torch.float32, **settings: Any
) -> list[str]:
    """The operators of one attention call on `device`, with 4 query heads."""
    query, key, value = (
        torch.zeros(2, n, 16, 8, dtype=dtype, device=device, requires_grad=True) for n in (4, heads, heads)
    )
    settings = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in settings.items()}
    with Names() as names:
        if device == "cpu":
            F.scaled_dot_product_attention(query, key, value, **settings)
        else:
            with fused_attention(kind):
                F.scaled_dot_product_attention(query, key, value, **settings)
    return names.names


CALLS: list[dict[str, Any]] = [
    {"is_causal": True},
    {"is_causal": True, "dtype": torch.bfloat16},
    {"is_causal": True, "heads": 2, "enable_gqa": True},
    {"is_causal": True, "dropout_p": 0.1},
    {"attn_mask": torch.ones(2, 1, 16, 16)},
]


@pytest.mark.parametrize("settings", CALLS, ids=lambda settings: "-".join(settings))
def test_a_cpu_gets_the_kernel_that_torch_takes_there(settings: dict[str, Any]) -> None:
    """On the meta device a call for a CPU becomes the operators that the same call is on the CPU."""
    assert called("meta", "cpu", **settings) == called("cpu", "cpu", **settings)


@pytest.mark.parametrize(
    "settings, kernel",
    [
        ({"is_causal": True, "dtype": torch.bfloat16}, "_scaled_dot_product_flash_attention"),
        ({"heads": 2, "enable_gqa": True, "dtype": torch.float16}, "_scaled_dot_product_flash_attention"),
        ({"is_causal": True}, "_scaled_dot_product_efficient_attention"),
        ({"attn_mask": torch.ones(16, 16).bool(), "dtype": torch.bfloat16}, "_scaled_dot_product_efficient_attention"),
    ],
    ids=["half", "half-gqa", "float", "mask"],
)
def test_a_gpu_gets_flash_or_efficient_attention(settings: dict[str, Any], kernel: str) -> None:
    """Half precision without a mask is flash attention, grouped heads included; the rest is efficient attention."""
    assert called("meta", "cuda", **settings)[-1] == kernel


def test_a_gpu_has_no_kernel_for_grouped_heads_with_a_mask() -> None:
    """Grouped heads with a mask are computed unfused."""
    names = called("meta", "cuda", heads=2, enable_gqa=True, attn_mask=torch.ones(16, 16), dtype=torch.bfloat16)
    assert names.count("bmm") == 2


def test_torchs_own_attention_module_is_fused() -> None:
    """`nn.MultiheadAttention`, which calls attention from inside torch, gets the fused kernel too."""
    module = nn.MultiheadAttention(32, 4, device="meta", dtype=torch.bfloat16)
    tensor = torch.empty(16, 2, 32, device="meta", dtype=torch.bfloat16)
    with fused_attention("cuda"), Names() as names:
        module(tensor, tensor, tensor, need_weights=False)
    assert "_scaled_dot_product_flash_attention" in names.names


def test_torch_is_left_as_it_was() -> None:
    """Once left, torch's attention function is its own again."""
    before = F.scaled_dot_product_attention
    with fused_attention("cpu"):
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before
