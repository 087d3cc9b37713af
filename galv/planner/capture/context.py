"""One rank of a context axis, seen alone: tensors have the right shapes, what would be said is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from galv.context_parallel import DeviceKind
from galv.planner.capture.trace import Recorder
from galv.planner.graph import CollectiveKind


@dataclass(frozen=True)
class RecordedRanks:
    """The first of `size` ranks; all have the same work."""

    size: int
    kind: DeviceKind
    recorder: Recorder
    rank: int = 0

    def exchange(self, tensor: Tensor) -> Tensor:
        """All-to-all."""
        self._record("all_to_all", tensor)
        return tensor.new_empty(tensor.shape)

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A message; the one that arrives has its place from the beginning."""
        self._record("p2p", tensor)
        arriving = tensor.new_empty(tensor.shape)
        return lambda: arriving

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather."""
        whole = tensor.new_empty((self.size, *tensor.shape))
        self._record("all_gather", whole)
        return whole

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce, in place."""
        self._record("all_reduce", tensor)
        return tensor

    def _record(self, kind: CollectiveKind, full: Tensor) -> None:
        self.recorder.record_collective(kind, full, "context")
