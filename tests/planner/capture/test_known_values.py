"""Which values a forward on the meta device may ask for."""

from __future__ import annotations

import pytest
import torch

from galv.planner.capture.known_values import MAX_ELEMENTS, KnownValues


def test_constants_are_known() -> None:
    """What follows from constants is known: consecutive positions, through views, slices and reductions."""
    with KnownValues():
        positions = torch.arange(16, device="meta")[None].expand(2, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        assert bool((steps == 1).all())
        assert positions.max().item() == 15
        assert int((positions[:, 4:] > 7).sum()) == 16


def test_changes_in_place_are_followed() -> None:
    """A constant that is changed in place is known as it is now."""
    with KnownValues():
        mask = torch.zeros(4, dtype=torch.bool, device="meta")
        mask[1:3] = True
        assert int(mask.sum()) == 2


def test_given_values_are_known() -> None:
    """Inputs whose values an example gives are known, and what follows from them."""
    mask = torch.empty(2, 3, dtype=torch.int64, device="meta")
    with KnownValues({mask: torch.ones(2, 3, dtype=torch.int64)}):
        assert bool(mask.all())


@pytest.mark.parametrize("kind", ["data", "random", "uninitialized", "large"])
def test_the_rest_is_unknown(kind: str) -> None:
    """What depends on data, chance, memory or a large tensor has no value, and neither has what follows from it."""
    tensor = torch.empty(4, device="meta")
    with KnownValues():
        made = {
            "data": lambda: (tensor > 0).any(),
            "random": lambda: torch.randint(0, 9, (1,), device="meta"),
            "uninitialized": lambda: torch.empty(1, dtype=torch.int64, device="meta"),
            "large": lambda: torch.ones(MAX_ELEMENTS + 1, device="meta").sum(),
        }[kind]()
        with pytest.raises(RuntimeError, match="meta tensors"):
            (made * torch.ones(1, dtype=torch.int64, device="meta")).item()
