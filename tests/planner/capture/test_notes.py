"""What a plan tells a person before training, and models that cannot be trained at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph


class Net(nn.Module):
    """Two layers; what it returns is the test's."""

    def __init__(self, result: str, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.ReLU(), nn.Linear(4, 4))
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return {"loss": y.mean(), "output": y, "detached": y.mean().detach()}.get(self.result, y)


def graph_of(model: nn.Module) -> ModelGraph:
    return capture(resolve_model(model, {"x": torch.randn(2, 4)}, seq_len=None), precision="fp32", device_kind="cpu")


def test_a_model_with_a_loss_has_nothing_to_note() -> None:
    """An ordinary model raises no remark."""
    assert graph_of(Net("loss")).notes == ()


def test_a_model_without_a_loss_is_noted() -> None:
    """It can be planned, and the plan says who can train it."""
    assert any("returns no loss" in note for note in graph_of(Net("output")).notes)


def test_batch_norm_is_noted() -> None:
    """Its statistics make parallel training differ from that of one device, which the plan says."""
    assert any("BatchNorm" in note for note in graph_of(Net("loss", norm=True)).notes)


def test_a_detached_loss_is_refused() -> None:
    """Nothing to differentiate is an error that says what is missing."""
    with pytest.raises(ModelError, match="nothing that Net returns has a gradient"):
        graph_of(Net("detached"))


def test_a_frozen_model_is_refused() -> None:
    """A model without trainable parameters has no plan."""
    with pytest.raises(ModelError, match="no trainable parameters"):
        graph_of(Net("loss").requires_grad_(False))
