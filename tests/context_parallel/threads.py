"""Ranks of a context axis that are threads of this process."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from galv.context_parallel import DeviceKind

T = TypeVar("T")
Boxes = defaultdict[tuple[int, int, int], "queue.Queue[Tensor]"]
"""By sender, receiver, and which call of the sender it was: messages are received as they were asked for."""
_PATIENCE_SECONDS = 20


class ThreadRank:
    """One of several that share `boxes`."""

    def __init__(self, rank: int, size: int, boxes: Boxes) -> None:
        self.rank, self.size, self.boxes = rank, size, boxes
        self.kind: DeviceKind = "cpu"
        self._calls = 0

    def exchange(self, tensor: Tensor) -> Tensor:
        """All-to-all along dim 0."""
        self._calls += 1
        for other, part in enumerate(tensor.clone()):
            self.boxes[self.rank, other, self._calls].put(part)
        return torch.stack([self._received(other, self._calls) for other in range(self.size)])

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A step round the ring."""
        self._calls += 1
        call = self._calls
        self.boxes[self.rank, (self.rank + 1) % self.size, call].put(tensor.clone())
        return lambda: self._received((self.rank - 1) % self.size, call)

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather along a new dim."""
        return self.exchange(tensor.expand(self.size, *tensor.shape))

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce."""
        return self.gather(tensor).sum(0)

    def _received(self, sender: int, call: int) -> Tensor:
        return self.boxes[sender, self.rank, call].get(timeout=_PATIENCE_SECONDS)


def on_ranks(size: int, task: Callable[[ThreadRank], T]) -> list[T]:
    """What `task` gives on each of `size` ranks that run side by side."""
    boxes: Boxes = defaultdict(queue.Queue)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: task(ThreadRank(rank, size, boxes)), range(size)))
