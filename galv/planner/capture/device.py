"""Makes the meta device behave like the device that the model is planned for, as far as models look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from galv.planner.capture.attention import DeviceKind, fused_attention
from galv.planner.capture.known_values import KnownValues


@contextmanager
def meta_as(device: DeviceKind, known: Mapping[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Within, meta tensors are differentiated and computed with as `device` would.

    Attention is fused, values that follow from constants (or from those in `known`) can be asked for, and autocast
    accepts the device, without changing what is computed in.
    """
    with torch.enable_grad(), KnownValues(known), fused_attention(device), _autocast_on_meta():
        yield


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Lets models switch autocast off (or on) for the device of a meta tensor, which torch refuses."""
    own = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]
