"""The ranks of a context axis, as attention sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

DeviceKind = Literal["cuda", "cpu"]


class Ranks(Protocol):
    """The ranks that share a sequence. Every rank must call the same in the same order; no gradients here."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def kind(self) -> DeviceKind:
        """On what kind of device they compute."""
        ...

    def exchange(self, tensor: Tensor) -> Tensor:
        """What all ranks have for this one, in rank order: of `tensor`, part i along dim 0 goes to rank i."""
        ...

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to send `tensor` to the next rank; what is returned waits for the one from the rank before."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """What all ranks have, in rank order along a new first dim."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of what all ranks have; may be written over `tensor`."""
        ...
