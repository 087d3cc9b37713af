"""Watches eager execution on the meta device, forward and the real autograd backward, and keeps what it saw.

A `Recorder` sees every aten call below autograd and writes it to its current `Trace`: the operators in order, the
storages that autograd saves for backward, and when each storage came and went. Storages are followed by weak
references, so the trace sees the lifetimes that a real run has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from galv.planner.capture.operators import describe, storage_key, tensors_in
from galv.planner.graph import Operator, Phase


class Timeline:
    """Bytes alive over time, counted from storages as they are made and dropped."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        """(storage number, bytes gained or lost)."""
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> None:
        """Follows the tensor's storage from now on, if that is new."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._numbers:
            return
        number = len(self.events)
        self._numbers[key] = number
        self.events.append((number, num_bytes))

        def freed(_: Any) -> None:
            self.events.append((number, -num_bytes))
            self._numbers.pop(key, None)
            self._references.pop(number, None)

        self._references[number] = weakref.ref(storage, freed)

    def number(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage, None when it is not followed."""
        return self._numbers.get(storage_key(tensor))

    def peak(self, start: int, stop: int, without: frozenset[int] = frozenset()) -> int:
        """Most bytes alive within events [start, stop) beyond those at `start`, storages in `without` left out."""
        alive = highest = 0
        for number, change in self.events[start:stop]:
            if number not in without:
                alive += change
                highest = max(highest, alive)
        return highest

    def stop(self) -> None:
        """Follows nothing any more."""
        self._references.clear()
        self._numbers.clear()


@dataclass
class Trace:
    """What was seen of one stretch of the model, forward and backward."""

    operators: list[Operator] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes by storage."""
    memory: Timeline = field(default_factory=Timeline)
    input_keys: set[int] = field(default_factory=set)
    """Storages given to the stretch from outside: saving them costs nothing here."""
    activation_key: int | None = None
    """The storage among them that carries the activation."""
    input_is_saved: bool = False
    output_key: int | None = None
    """The storage that goes on to the next unit, whose input it is: where saved, it counts there."""
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        return sum(num_bytes for key, num_bytes in self.saved.items() if key != self.output_key)

    def expect(self, inputs: Any, activation: Tensor | None = None) -> None:
        """Takes every tensor in `inputs` as given to the stretch from outside, `activation` being one of them."""
        self.input_keys.update(storage_key(tensor) for tensor in tensors_in(inputs))
        self.activation_key = None if activation is None else storage_key(activation)

    @property
    def is_empty(self) -> bool:
        """Whether the stretch does nothing that takes time."""
        return all(op.kind == "view" for op in self.operators)


class Recorder(TorchDispatchMode):
    """Writes every aten call to `trace`, or lets it pass unseen while `trace` is None."""

    def __init__(self, parameters: Sequence[Tensor], trace: Trace | None = None) -> None:
        super().__init__()
        self.trace = trace
        self.phase: Phase = "forward"
        self.modules: list[str] = []
        """Names of the modules whose forward is running, innermost last."""
        self.used: Callable[[Tensor], None] | None = None
        """Told of every tensor argument."""
        self.parameter_keys = {storage_key(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        trace = self.trace
        if trace is None:
            return out
        if self.used is not None:
            for tensor in tensors_in((args, kwargs)):
                self.used(tensor)
        module = self.modules[-1] if self.modules else ""
        trace.operators.append(describe(func, args, kwargs, out, self.phase, module))
        for tensor in tensors_in(out):
            if storage_key(tensor) not in trace.input_keys and storage_key(tensor) not in self.parameter_keys:
                trace.memory.add(tensor)
        return out

    def record(self, operator: Operator) -> None:
        """Adds an operator that is no aten call: a collective."""
        if self.trace is not None:
            self.trace.operators.append(operator)

    # -- saved tensors

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves: a `pack` hook."""
        trace, key = self.trace, storage_key(tensor)
        if trace is None or key in self.parameter_keys:
            return tensor
        trace.input_is_saved |= key == trace.activation_key
        if key not in trace.input_keys:
            trace.saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Records a forward within."""
        self.phase = "forward"
        with self, torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            yield

    def backward(self, outputs: list[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[bool]:
        """Which of `inputs` the outputs depend on; their backward is recorded into the current trace.

        Gradients arrive at `outputs` as fresh tensors, and gradients of parameters are not counted as memory. Empties
        `outputs`, so that they live no longer than backward needs them.
        """
        trace = self.trace
        assert trace is not None, "backward belongs to a trace"
        memory, start = trace.memory, len(trace.memory.events)
        trace.forward_peak_bytes = max(trace.forward_peak_bytes, memory.peak(0, start))
        targets = [*inputs, *parameters]
        if not targets or not any(output.requires_grad for output in outputs):
            return [False] * len(inputs)
        scalar = seed(outputs)
        one = torch.ones_like(scalar)
        outputs.clear()
        self.phase, self.modules = "backward", []
        with self:
            grads = torch.autograd.grad(scalar, targets, one, allow_unused=True)
        own = (memory.number(grad) for grad in grads[len(inputs) :] if grad is not None)
        without = frozenset(number for number in own if number is not None)
        peak = memory.peak(start, len(memory.events), without)
        trace.backward_peak_bytes = max(trace.backward_peak_bytes, peak)
        return [grad is not None for grad in grads[: len(inputs)]]

    @contextmanager
    def naming(self, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Attributes operators to these (name, module) while within."""
        handles = []
        for name, module in modules:

            def enter(_: nn.Module, args: Any, name: str = name) -> None:
                self.modules.append(name)

            def leave(_: nn.Module, args: Any, output: Any) -> None:
                if self.modules:
                    self.modules.pop()

            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives each input a gradient made on the spot, which nothing else keeps alive."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.empty((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def seed(outputs: Sequence[Tensor]) -> Tensor:
    """A scalar to start backward from, where gradients reach `outputs` from outside."""
    scalar = _Seed.apply(*outputs)
    assert isinstance(scalar, Tensor)
    return scalar
