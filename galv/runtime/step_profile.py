"""What one training step did, by torch's profiler: seconds busy with forward and backward, and its collectives."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.autograd.profiler import record_function

Item = TypeVar("Item")

MARK = "galv::"


def busy(kind: str) -> record_function:
    """Marks the time within as work of a stage: `forward`, `backward`, `input` or `weight`."""
    return record_function(MARK + kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """Some builds of torch's profiler write lines of their own to standard error when it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class StepProfile:
    """Profiles the last of `count` steps."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._profiler: torch.profiler.profile | None = None
        self.busy_seconds = 0.0
        """Forward and backward of all microbatches; 0 where no step was profiled."""
        self.collectives: dict[str, tuple[int, float]] = {}
        """By name, how many and their seconds."""

    def around(self, steps: Iterable[Item]) -> Iterator[Item]:
        """`steps`, the last of them profiled; each is done when it comes out."""
        for number, item in enumerate(steps, start=1):
            if number == self._count and self._profiler is not None:
                with _quiet():
                    self._profiler.stop()
                self._read(self._profiler)
            if number == self._count - 1:
                self._profiler = torch.profiler.profile(acc_events=True)
                with _quiet():
                    self._profiler.start()
            yield item

    def _read(self, profiler: torch.profiler.profile) -> None:
        for event in profiler.key_averages():
            name = event.key
            seconds = max(event.cpu_time_total, getattr(event, "device_time_total", 0.0)) * 1e-6
            if name.startswith(MARK):
                self.busy_seconds += seconds
            elif name.startswith(("gloo:", "nccl:")):
                count, known = self.collectives.get(name, (0, 0.0))
                self.collectives[name] = count + event.count, known + seconds
