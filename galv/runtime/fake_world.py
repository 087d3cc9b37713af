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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from galv.errors import RunError
from galv.runtime import tensor_parallel
from galv.runtime.replicas import Replicas


@contextlib.contextmanager
def fake_world(world_size: int, rank: int, *, all_to_all: bool) -> Iterator[FakeTensorMode]:
    """The mode that makes tensors fake, in a process group of `world_size` in which this process is `rank`.

    Devices are CPUs to torch, which differ from GPUs in what they call: `all_to_all` says whether they have that.

    Raises RunError when there is a process group already.
    """
    if dist.is_initialized():
        raise RunError("a plan is checked in a process of its own, and this one is in a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "all_gather_object", _gathered_from_nobody))
            stack.enter_context(mock.patch.object(Replicas, "_replicated", _with_own_reduction(Replicas._replicated)))
            if all_to_all:
                stack.enter_context(mock.patch.object(tensor_parallel, "_lacks_all_to_all", return_value=False))
                stack.enter_context(mock.patch.object(placement_types, "shard_dim_alltoall", _exchanged))
            utilities = sys.modules.get("transformers.utils.import_utils")
            if hasattr(utilities, "is_fake_tensor"):  # models build other masks for tensors that they know to be fake
                stack.enter_context(mock.patch.object(utilities, "is_fake_tensor", return_value=False))
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


def _exchanged(tensor: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    """DTensor's all-to-all as on devices that have one."""
    name = functional._resolve_group_name((mesh, mesh_dim))
    return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, name)


def _with_own_reduction(own: Any) -> Any:
    """DistributedDataParallel where its reducer works on fake tensors.

    The reducer would build its buckets anew after the first step, from values that it exchanges. It is left with the
    one bucket that it has before, which is reduced in the parts that it would have made: in the order in which
    gradients have become ready, by torch's own rule.
    """

    def replicated(replicas: Replicas, *args: Any) -> Any:
        ddp = own(replicas, *args)
        ready: list[Tensor] = []
        for parameter in ddp.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ready.append)
        ddp.reducer = _NotRebuilding(ddp.reducer)
        ddp.register_comm_hook(replicas._group, _reducing(ready, ddp.bucket_bytes_cap))
        return ddp

    return replicated


class _NotRebuilding:
    """DistributedDataParallel's reducer, which keeps its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reducing(ready: list[Tensor], most_bytes: int) -> Any:
    """A hook that reduces a bucket in parts."""

    def reduce(group, bucket):  # without annotations, which torch wants as types and not as text
        buffer = bucket.buffer()
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, most_bytes]
        order = ready[-len(bucket.parameters()) :]  # those of microbatches before, too, have become ready
        parts, _ = dist._compute_bucket_assignment_by_size(order, limits, [False] * len(order))
        for part in buffer.split([sum(order[i].numel() for i in indices) for indices in parts]):
            dist.all_reduce(part, group=group)
        ready.clear()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    return reduce
