"""A world of any size with one real process: no memory behind tensors, nobody at the other end of collectives.

Tensors are torch's fake tensors, which have everything but values; the process group is torch's `fake` backend, whose
collectives return at once. What the program asks a tensor for is answered as in a run without surprises: numbers are 1,
counts 0, conditions true.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from galv.errors import RunError


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[FakeTensorMode]:
    """The mode that makes tensors fake, in a process group of `world_size` in which this process is `rank`.

    Raises RunError when there is a process group already.
    """
    if dist.is_initialized():
        raise RunError("a plan is checked in a process of its own, and this one is in a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "all_gather_object", _gathered_from_nobody))
            utilities = sys.modules.get("transformers.utils.import_utils")
            if hasattr(utilities, "is_fake_tensor"):  # models build other masks for tensors that they know to be fake
                stack.enter_context(mock.patch.object(utilities, "is_fake_tensor", lambda value: False))
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it is kept by mesh, and the next world's meshes look like this one's


def stand_in(tensor: torch.Tensor) -> bool | float | int:
    """What a fake tensor of one element answers when it is asked for its value."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 0


def _gathered_from_nobody(objects: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    objects[:] = [None] * len(objects)
    objects[dist.get_rank(group)] = own
