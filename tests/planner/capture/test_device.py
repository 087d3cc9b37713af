"""What models may do on the meta device while they are traced, and that torch is put back afterwards."""

from __future__ import annotations

import pytest
import torch

from galv.planner.capture.device import meta_as


def test_autocast_may_be_switched_off_for_a_meta_tensor() -> None:
    """Models switch autocast off for the device of a tensor they have; torch alone refuses that on the meta device."""
    tensor = torch.empty(4, device="meta")
    with meta_as("cuda"), torch.autocast(device_type=tensor.device.type, enabled=False):
        assert (tensor + 1).dtype == torch.float32


def test_torch_is_left_as_it_was() -> None:
    """Once left, also by an error, torch is its own again."""
    before = torch.autocast.__init__, torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), meta_as("cpu"):
        _ = 1 / 0
    assert (torch.autocast.__init__, torch.nn.functional.scaled_dot_product_attention) == before
