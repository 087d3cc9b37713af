"""Takes the place of `scaled_dot_product_attention` while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from galv.context_parallel.ranks import Ranks
from galv.context_parallel.ring import ring_attention
from galv.context_parallel.ulysses import ulysses_attention
from galv.errors import RunError
from galv.planner.plan import SequenceLayout

Attend = Callable[..., Tensor]
"""Attention: called with what it replaces, and then with the arguments of that."""

_GENERAL = F.scaled_dot_product_attention


@contextmanager
def replaced_attention(attend: Attend) -> Iterator[None]:
    """Within, every `scaled_dot_product_attention` is `attend`, whose own calls of it are what they were before.

    The name in `torch.nn.functional` is replaced as well, because a torch-function mode does not see the calls that
    torch's own functions (`multi_head_attention_forward`) make.
    """
    mode, before = _Replaced(attend), F.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return mode.call(before, args, kwargs)

    F.scaled_dot_product_attention = replaced
    try:
        with mode:
            yield
    finally:
        F.scaled_dot_product_attention = before


class _Replaced(TorchFunctionMode):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self._attending = False

    def call(self, general: Attend, args: Any, kwargs: Any) -> Tensor:
        if self._attending:
            return general(*args, **kwargs)
        self._attending = True
        try:
            return self.attend(general, *args, **kwargs)
        finally:
            self._attending = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.call(func, args, kwargs) if func is _GENERAL else func(*args, **kwargs)


@contextmanager
def exchanging_attention(layout: SequenceLayout, ranks: Ranks) -> Iterator[None]:
    """Within, which is one forward of a block, attention sees the whole sequence of which `ranks` hold the parts.

    Raises RunError when the block attends more often than when `layout` was made.
    """
    calls = iter(layout.attention)

    def attend(general: Attend, *args: Any, **kwargs: Any) -> Tensor:
        kind = next(calls, None)
        if kind is None:
            raise RunError(
                f"a block of class {layout.unit_class} called attention more than the {len(layout.attention)} times "
                "that it did when it was planned; plan again"
            )
        if kind == "local":
            return general(*args, **kwargs)
        if layout.mode == "ulysses":
            return ulysses_attention(general, ranks, *args, **kwargs)
        # The block's own calls are counted by other modes; these are not the block's.
        with torch._C.DisableTorchFunction():
            return ring_attention(ranks, layout.balanced, *args, **kwargs)

    with replaced_attention(attend):
        yield
