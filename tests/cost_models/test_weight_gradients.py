"""Which part of backward can run later, read off real models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galv.cost_models.weight_gradients import factor_bytes, put_off, weight_seconds
from galv.planner.capture.facts import block_facts
from galv.planner.capture.sample import ModuleCall
from galv.planner.graph import UnitFacts
from galv.profiles.device import load_device


class Block(nn.Module):
    """Two projections of one input, a norm, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 32),
            nn.Linear(8, 32, bias=False),
            nn.Linear(32, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scores = x @ x.transpose(-1, -2)
        return scores @ self.down(self.up(x) * self.gate(x))


def facts() -> UnitFacts:
    """Of the block for 3 samples of 4."""
    with torch.device("meta"):
        return block_facts(Block(), ModuleCall("", (torch.empty(3, 4, 8),), {}, "0"), "cuda")


def test_products_that_make_weight_gradients_are_put_off() -> None:
    """One for each projection, with its shape; gradients of norms, biases and activations are not."""
    later = put_off(facts(), "none")

    assert sorted(op.matmul for op in later) == [(1, 8, 32, 12), (1, 32, 8, 12), (1, 32, 8, 12)]
    assert put_off(facts(), "full") == ()


def test_what_is_kept_meanwhile() -> None:
    """The gradients of the three results, and what went into the projections, in fp32."""
    assert factor_bytes(facts(), "none") == 4 * 12 * ((8 + 32 + 32) + (32 + 8 + 8))
    device = load_device("a100-sxm-80")
    assert weight_seconds(facts(), "none", device) > 0
