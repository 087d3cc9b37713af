"""What of a unit lies in the host's memory while the device does not need it.

* `activations`: what a unit keeps for backward goes to the host as forward makes it and comes back for its backward.
  The unit before is fetched while one computes, so that copies run beside computation (as vDNN, arXiv 1602.08124).
  Parameters are kept by others and stay. With recomputation it is the unit's input that goes.
* `optimizer`: fp32 masters, their gradients and the optimizer's moments; the update runs on the host (ZeRO-Offload,
  arXiv 2101.06840). The device has the gathered copy that it computes with.
* `parameters`: the same under zero 3, where nothing of a unit is on the device but while it runs (ZeRO-Infinity, arXiv
  2104.07857). Masters are the parameters there, so both go together.

The last two are FSDP2's `CPUOffloadPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from galv.planner.plan import Strategy
from galv.storages import storage_key


def state_policy(strategies: Iterable[Strategy], device: torch.device) -> OffloadPolicy:
    """Where FSDP keeps the shards of units with these strategies; pinned where a GPU copies them."""
    if any("optimizer" in strategy.offload for strategy in strategies):
        return CPUOffloadPolicy(pin_memory=device.type == "cuda")
    return OffloadPolicy()


# ----------------------------------------------------------------------------------------------- activations


class HostMemory:
    """Copies between a device and its host: on a GPU beside its computation, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def store(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete when the host or a later `load` looks at it."""
        if self._stream is None:
            return tensor.detach().clone(memory_format=torch.preserve_format)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)
        return host

    def load(self, host: Tensor) -> Tensor:
        """A copy on the device, to be used after `wait`."""
        if self._stream is None:
            return host.clone(memory_format=torch.preserve_format)
        with torch.cuda.stream(self._stream):
            return host.to(self._device, non_blocking=True)

    def wait(self, tensor: Tensor) -> None:
        """Makes what is computed from now on see the whole of a loaded tensor."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)


class _Away:
    """A tensor that lies on the host until it is fetched."""

    def __init__(self, memory: HostMemory, tensor: Tensor, group: _Group) -> None:
        self._memory, self._host, self._group = memory, memory.store(tensor), group
        self._fetched: Tensor | None = None
        self._lent: ref[Tensor] | None = None

    def fetch(self) -> None:
        """Begins to bring it back."""
        if self._fetched is None and (self._lent is None or self._lent() is None):
            self._fetched = self._memory.load(self._host)

    def tensor(self) -> Tensor:
        """The tensor on the device; afterwards only who asked for it keeps it there."""
        self._group.arrive()
        tensor = self._lent() if self._lent is not None else None
        if tensor is None:
            self.fetch()
            assert self._fetched is not None
            tensor, self._fetched = self._fetched, None
            self._memory.wait(tensor)
            self._lent = ref(tensor)
        return tensor


class _Group:
    """What one unit keeps for the backward of one microbatch."""

    def __init__(self, position: int, before: _Group | None) -> None:
        self.position, self._before = position, before
        self._members: list[ref[_Away]] = []
        self._arrived = False

    def add(self, away: _Away) -> None:
        """Takes a tensor into the group, as long as autograd keeps it."""
        self._members.append(ref(away))

    def fetch(self) -> None:
        """Begins to bring back all that is still needed."""
        for member in self._members:
            if (away := member()) is not None:
                away.fetch()

    def arrive(self) -> None:
        """Backward has come to this unit: the one before it is next."""
        if not self._arrived:
            self._arrived = True
            self.fetch()
            if self._before is not None:
                self._before.fetch()
            self._before = None


class ActivationOffload:
    """Takes the activations of a stage's units to the host. Units are added in the order of the model."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._num_units = 0
        self._last: ref[_Group] | None = None

    def add(self, module: nn.Module) -> None:
        """What `module`, one unit, keeps for backward lies on the host from now on."""
        position = self._num_units
        self._num_units += 1
        active: list[saved_tensors_hooks] = []

        def enter(module: nn.Module, args: Any) -> None:
            active.append(self._hooks(module, position))
            active[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if active:
                active.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, prepend=True, always_call=True)

    def _hooks(self, module: nn.Module, position: int) -> saved_tensors_hooks:
        last = None if self._last is None else self._last()
        group = _Group(position, last if last is not None and last.position < position else None)
        self._last = ref(group)
        kept = {storage_key(_local(parameter)) for parameter in module.parameters()}
        known: dict[Any, tuple[ref[Any], _Away]] = {}
        """With the storage that each came from: another one may get its place in memory."""

        def pack(tensor: Tensor) -> Tensor | _Away:
            if not tensor.numel() or storage_key(tensor) in kept or isinstance(tensor, DTensor):
                return tensor
            name = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
            if name not in known or known[name][0]() is None:
                known[name] = ref(tensor.untyped_storage()), _Away(self._memory, tensor, group)
                group.add(known[name][1])
            return known[name][1]

        return saved_tensors_hooks(pack, lambda kept: kept.tensor() if isinstance(kept, _Away) else kept)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
