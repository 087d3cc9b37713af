"""Runs a unit's modules as one rank of a tensor-parallel group would: local shapes are real, the other ranks are not.

The hooks are the runtime's own (`galv.localize`). What they are given here makes tensors of the right local shape and
records the collective that the runtime would issue, with the copies that torch.distributed makes around it: it
gathers and scatters along dim 0 only, so other dims are rearranged in memory.

A change of layout moves the value forward and its gradient backward. The value of `R+` is `R`; the gradient of `R+` is
`P`, that of `P` is `R`, and others are like the value. So both directions are one of few moves between R, S and P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.localize import localize
from galv.planner.capture.trace import Recorder
from galv.planner.graph import CollectiveKind
from galv.planner.plan import Layout, Redistribution, TensorParallelLayout
from galv.storages import storage_key

_REPLICATED = Layout(kind="R")
_PARTIAL = Layout(kind="P")
_SEQUENCE = Layout(kind="S", dim=1)


class Emulation:
    """One rank's view of the modules that `layout` names, recorded by `recorder`."""

    def __init__(
        self, module_named: Callable[[str], nn.Module], layout: TensorParallelLayout, recorder: Recorder
    ) -> None:
        self.module_named, self.layout, self.recorder = module_named, layout, recorder
        self._local: dict[tuple[int, str], nn.Parameter] = {}
        self._replaced: set[int] = set()
        for part in layout.modules:
            module = module_named(part.module)
            for name, change in part.parameters.items():
                self._localize_parameter(module, name, change.source)

    def _localize_parameter(self, module: nn.Module, name: str, stored: Layout) -> None:
        whole = module.get_parameter(name)
        shape = self._local_shape(whole.shape, stored)
        local = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
        self._local[id(module), name] = local
        self._replaced.add(id(whole))
        self.recorder.parameter_keys.add(storage_key(local))

    def _local_shape(self, shape: torch.Size, layout: Layout) -> list[int]:
        local = list(shape)
        if layout.kind == "S":
            assert layout.dim is not None
            if shape[layout.dim] % (self.layout.degree * layout.chunks):
                raise ModelError(
                    f"dim {layout.dim} of a tensor of shape {tuple(shape)} in {self.layout.unit_class} cannot be cut "
                    f"into {layout.chunks} x {self.layout.degree} equal parts"
                )
            local[layout.dim] //= self.layout.degree
        return local

    def parameters(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """What this rank trains instead of `parameters`."""
        local = [parameter for parameter in self._local.values() if parameter.requires_grad]
        return [p for p in parameters if id(p) not in self._replaced] + local

    def activation(self, tensor: Tensor) -> Tensor:
        """The local part of the activation that a repeated block gets."""
        if self.layout.sequence != "megatron":
            return tensor
        return tensor.new_empty(self._local_shape(tensor.shape, _SEQUENCE)).requires_grad_(tensor.requires_grad)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The modules compute on local tensors within."""
        handles = localize(self.module_named, self.layout, self.redistribute, self._local_parameter)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _local_parameter(self, module: nn.Module, name: str) -> Tensor:
        return self._local[id(module), name]

    def redistribute(self, tensor: Tensor, change: Redistribution) -> Tensor:
        """The local tensor after `change`; its gradient takes the way back."""
        moved = _Redistribute.apply(tensor, change, self)
        assert isinstance(moved, Tensor)
        return moved

    # -- moves between R, S and P

    def move(self, tensor: Tensor, source: Layout, target: Layout) -> Tensor:
        """`tensor` moved from one layout of R, S, P to another."""
        if source == target:
            return tensor.view_as(tensor)
        moves: dict[tuple[str, str], Callable[[], Tensor]] = {
            ("S", "R"): lambda: self._gather(tensor, source),
            ("P", "R"): lambda: self._reduce(tensor),
            ("P", "S"): lambda: self._reduce_scatter(tensor, target),
            ("R", "S"): lambda: self._cut(tensor, target),
            ("S", "S"): lambda: self._exchange(tensor, source, target),
            ("R", "P"): lambda: tensor / self.layout.degree,
        }
        pair = (source.kind, target.kind)
        if pair not in moves:
            raise ModelError(f"{self.layout.unit_class}: no collective changes the layout {source} to {target}")
        return moves[pair]()

    def _gather(self, tensor: Tensor, source: Layout) -> Tensor:
        degree, dim = self.layout.degree, source.dim
        gathered = tensor.new_empty((degree * tensor.shape[0], *tensor.shape[1:]))
        self._collective("all_gather", gathered)
        if dim == 0 and source.chunks == 1:
            return gathered
        return torch.cat(gathered.chunk(degree), dim or 0)

    def _reduce(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        self._collective("all_reduce", summed)
        return summed

    def _reduce_scatter(self, tensor: Tensor, target: Layout) -> Tensor:
        if target.dim != 0 or target.chunks > 1:
            assert target.dim is not None
            tensor = torch.cat(tensor.chunk(self.layout.degree, target.dim))
            shape = [tensor.shape[0] // self.layout.degree, *tensor.shape[1:]]
        else:
            shape = self._local_shape(tensor.shape, target)
        self._collective("reduce_scatter", tensor)
        return tensor.new_empty(shape)

    def _cut(self, tensor: Tensor, target: Layout) -> Tensor:
        assert target.dim is not None
        length = self._local_shape(tensor.shape, target)[target.dim]
        return tensor.narrow(target.dim, 0, length).clone(memory_format=torch.contiguous_format)

    def _exchange(self, tensor: Tensor, source: Layout, target: Layout) -> Tensor:
        assert source.dim is not None and target.dim is not None
        shape = self._local_shape(tensor.shape, target)
        shape[source.dim] *= self.layout.degree
        sent = tensor.clone(memory_format=torch.contiguous_format)
        self._collective("all_to_all", sent)
        return sent.new_empty(shape).clone()

    def _collective(self, kind: CollectiveKind, full: Tensor) -> None:
        self.recorder.record_collective(kind, full, "tensor")


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Redistribution, emulation: Emulation) -> Tensor:
        ctx.change, ctx.emulation = change, emulation
        return emulation.move(tensor, _value(change.source), _value(change.target))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        change: Redistribution = ctx.change
        return ctx.emulation.move(grads[0], _gradient(change.target), _gradient(change.source)), None, None


def _value(layout: Layout) -> Layout:
    return _REPLICATED if layout.kind == "R+" else layout


def _gradient(layout: Layout) -> Layout:
    return {"R+": _PARTIAL, "P": _REPLICATED}.get(layout.kind, layout)
