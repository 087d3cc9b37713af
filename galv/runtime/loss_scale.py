"""Keeps half-precision gradients from vanishing: the loss is scaled up before backward, gradients down after it.

As Micikevicius et al., arXiv 1710.03740, with the numbers of `torch.amp.GradScaler`: a step whose gradients overflow is
skipped and halves the scale; many good steps in a row double it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from galv.errors import UsageError

GROWTH_INTERVAL = 2000


class LossScale:
    """The current scale, and how many good steps it has lasted."""

    def __init__(self, value: float = 2.0**16) -> None:
        self.value = value
        self.good_steps = 0

    def check_fresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises UsageError when there are gradients of an earlier step, which have been scaled down already."""
        if any(parameter.grad is not None for parameter in parameters):
            raise UsageError(
                "under fp16 a step needs fresh gradients: call optimizer.zero_grad() before train_step, "
                "and raise the plan's global batch to accumulate over more samples"
            )

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Scales gradients down in place."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.value)

    def settle(self, parameters: Iterable[nn.Parameter], norm: Tensor) -> None:
        """Drops the gradients when their global `norm` is not finite, so that an optimizer skips the step."""
        if torch.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == GROWTH_INTERVAL:
                self.value, self.good_steps = self.value * 2, 0
            return
        self.value, self.good_steps = self.value / 2, 0
        for parameter in parameters:
            parameter.grad = None
