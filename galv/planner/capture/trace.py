"""Watches eager execution on the meta device, forward and the real autograd backward, and keeps what it saw.

A `Recorder` sees every aten call below autograd and writes it to its current `Trace`: the operators in order, the
storages that autograd saves for backward, and when each storage came and went. Storages are followed by weak
references, so the trace sees the lifetimes that a real run has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from galv.planner.capture.operators import describe
from galv.planner.graph import Axis, CollectiveKind, Operator, Phase
from galv.storages import Timeline, storage_key, tensors_in


@dataclass
class Trace:
    """What was seen of one stretch of the model, forward and backward."""

    operators: list[Operator] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes by storage."""
    memory: Timeline = field(default_factory=Timeline)
    given: set[int] = field(default_factory=set)
    """Storages given to the stretch from outside: saving them costs nothing here."""
    given_saved: set[int] = field(default_factory=set)
    """Those of them that it saves."""
    activation_key: int | None = None
    """The storage among them that carries the activation."""
    input_is_saved: bool = False
    num_before_last_saved: int = 0
    """Operators that ran before the last tensor was saved."""
    output_keys: set[int] = field(default_factory=set)
    """Storages that are the activation of the next unit: where saved, they count there."""
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    forward_end: int = 0
    """The number of memory events when backward began."""
    products: dict[int, int] = field(default_factory=dict)
    """By number of the result's storage in `memory`, the plain matrix product of backward that made it, as its place in
    `operators`."""

    @property
    def saved_bytes(self) -> int:
        return sum(num_bytes for key, num_bytes in self.saved.items() if key not in self.output_keys)

    def expect(self, inputs: Any, activation: Tensor | None = None) -> None:
        """Takes every tensor in `inputs` as given to the stretch from outside, `activation` being one of them."""
        self.given.update(storage_key(tensor) for tensor in tensors_in(inputs))
        self.activation_key = None if activation is None else storage_key(activation)

    @property
    def is_empty(self) -> bool:
        """Whether the stretch does nothing that takes time."""
        return all(op.kind == "view" for op in self.operators)

    def end_forward(self) -> None:
        """Backward begins."""
        self.forward_end = len(self.memory.events)
        self.forward_peak_bytes = max(self.forward_peak_bytes, self.memory.peak(0, self.forward_end))

    def end_backward(self, gradients: Iterable[Tensor | None]) -> None:
        """Backward is over; what `gradients` of parameters hold is not counted as memory of the stretch."""
        made = [grad for grad in gradients if grad is not None]
        numbers = (self.memory.number(grad) for grad in made)
        own = frozenset(number for number in numbers if number is not None)
        for place in (self.products[number] for number in own & self.products.keys()):
            self.operators[place] = replace(self.operators[place], is_weight_gradient=True)
        peak = self.memory.peak(self.forward_end, len(self.memory.events), own)
        self.backward_peak_bytes = max(self.backward_peak_bytes, peak)


class Recorder(TorchDispatchMode):
    """Writes every aten call to `trace`, or lets it pass unseen while `trace` is None."""

    def __init__(self, parameters: Sequence[Tensor], trace: Trace | None = None) -> None:
        super().__init__()
        self.trace = trace
        self.phase: Phase = "forward"
        self.modules: list[str] = []
        """Names of the modules whose forward is running, innermost last."""
        self.seen: Callable[[Any, Any], None] | None = None
        """Told of the arguments and the result of every call."""
        self.stretch_of: Callable[[int], Trace] | None = None
        """In backward: the trace of what has this autograd sequence number."""
        self.elsewhere: Callable[[int], Trace | None] | None = None
        """The trace, other than the current one, that made a storage."""
        self.current: Any = None
        """The operator that is running, or that failed."""
        self.parameter_keys = {storage_key(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.current = func
        out = func(*args, **kwargs)
        self.current = None
        if self.seen is not None:
            self.seen((args, kwargs), out)
        trace = self._trace()
        if trace is None:
            return out
        inputs = list(tensors_in((args, kwargs)))
        module = self.modules[-1] if self.modules else ""
        place = len(trace.operators)
        trace.operators.append(describe(func, args, kwargs, out, self.phase, module))
        held = {storage_key(tensor) for tensor in inputs}
        for tensor in tensors_in(out):
            if storage_key(tensor) not in held:
                trace.memory.add(tensor)
        if self.phase == "backward" and func is torch.ops.aten.mm.default:
            number = trace.memory.number(out)
            assert number is not None, "just added"
            trace.products[number] = place
        return out

    def _trace(self) -> Trace | None:
        """Where the running operator belongs: in backward, to the stretch whose forward made the running node."""
        if self.phase == "backward" and self.stretch_of is not None:
            node = torch._C._current_autograd_node()
            if node is not None:
                self.trace = self.stretch_of(node._sequence_nr())
        return self.trace

    def record_collective(self, kind: CollectiveKind, full: Tensor, axis: Axis) -> None:
        """Adds an operator that is no aten call: a collective over `axis` that has `full` to move."""
        if self.trace is not None:
            operator = Operator(
                name=kind,
                kind="collective",
                phase=self.phase,
                module=self.modules[-1] if self.modules else "",
                dtype=str(full.dtype).removeprefix("torch."),
                bytes_read=full.numel() * full.element_size(),
                collective=kind,
                axis=axis,
            )
            self.trace.operators.append(operator)

    # -- saved tensors

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves, for the stretch that made it: a `pack` hook."""
        trace, key = self.trace, storage_key(tensor)
        if trace is None:
            return tensor
        trace.num_before_last_saved = len(trace.operators)
        if key in self.parameter_keys:
            return tensor
        trace.input_is_saved |= key == trace.activation_key
        if key in trace.given:
            trace.given_saved.add(key)
            return tensor
        maker = None
        if self.elsewhere is not None and trace.memory.number(tensor) is None:
            maker = self.elsewhere(key)
        (maker or trace).saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Records a forward within."""
        self.phase = "forward"
        with self, torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            yield

    def backward(self, outputs: list[Tensor], targets: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of `outputs` for each of `targets`, None where they do not depend on it; backward is recorded.

        Gradients arrive at `outputs` as fresh tensors. Empties `outputs`, so that they live no longer than backward
        needs them.
        """
        if not targets or not any(output.requires_grad for output in outputs):
            return [None] * len(targets)
        scalar = seed(outputs)
        one = torch.ones_like(scalar)
        outputs.clear()
        self.phase, self.modules, self.seen = "backward", [], None
        with self:
            return list(torch.autograd.grad(scalar, list(targets), one, allow_unused=True))

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
