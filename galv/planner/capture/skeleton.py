"""Runs the whole model once with a stub in each block's place, and keeps what happens around the blocks.

A stub notes the arguments that its block gets and returns tensors of the right shapes, which are computed once for
each kind of call; so the cost hardly grows with depth. The stretches between blocks are traced, forward and backward:
stretch 0 lies before the first block, stretch i after block i - 1.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from galv.errors import ModelError
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.device import meta_as
from galv.planner.capture.emulate import Emulation
from galv.planner.capture.operators import storage_key, tensors_in
from galv.planner.capture.sample import ModuleCall
from galv.planner.capture.trace import Recorder, Trace

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Where no line of the model's own is."""

Named = tuple[str, nn.Module]
Outputs = dict[Hashable, Any]
"""Example outputs of blocks by kind of block and call: filled by one run, used by the next."""


@dataclass(eq=False)
class BlockCall:
    """What one block was given."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Hashable
    """Equal for calls that do the same work: same kind of block, same shapes, flags and arguments given."""
    numbers: tuple[float | None, ...]
    """The arguments that are numbers, None for each other leaf of the arguments."""
    activation: str | None = None
    """The argument that depends on the block before; for the first block the same one as for the second."""
    output_bytes: int = 0
    """Bytes of the first differentiable output."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by position ("0") or keyword."""
        return {str(i): value for i, value in enumerate(self.args)} | self.kwargs


@dataclass
class SkeletonRun:
    """What one run of the model saw."""

    stretches: list[Trace]
    calls: list[BlockCall] = field(default_factory=list)
    """In the order of execution."""
    uses: dict[int, set[int]] = field(default_factory=dict)
    """Stretches with operators that take a parameter, by its storage."""
    module_calls: dict[str, tuple[int, ModuleCall]] = field(default_factory=dict)
    """(stretch, first call) of each watched module."""

    @property
    def is_chain(self) -> bool:
        """Whether every block works on the output of the block before."""
        return all(call.activation is not None for call in self.calls)


class Skeleton:
    """The model with stubs for `blocks`; `owners` are the modules around them that hold parameters."""

    def __init__(self, model: nn.Module, blocks: Sequence[Named], owners: Sequence[Named], device: DeviceKind) -> None:
        self.model, self.blocks, self.owners, self.device = model, blocks, owners, device
        self.kinds: dict[str, Hashable] = {}
        """Blocks of equal kind give outputs of equal shape for equal arguments; a block without one is its own kind."""
        self.outputs: Outputs = {}

    def run(
        self,
        inputs: Mapping[str, Tensor],
        known: Mapping[str, Tensor] | None = None,
        emulate: Callable[[Recorder], Emulation] | None = None,
        *,
        stops_at_block: bool = False,
    ) -> SkeletonRun:
        """One run, forward and backward. Raises ModelError when the model's forward fails.

        `known` are values of some inputs, `emulate` makes some modules around the blocks compute on local tensors. With
        `stops_at_block` only what lies before the first block is run.
        """
        recorder = Recorder(list(self.model.parameters()))
        emulation = emulate(recorder) if emulate else None
        run = _Run(self, recorder, stops_at_block)
        run.result.stretches[0].expect(dict(inputs))
        values = {inputs[name]: value for name, value in (known or {}).items()}
        with meta_as(self.device, values):
            local = emulation.installed() if emulation else nullcontext()
            with run.stubs(), local, run.watching(), recorder.forward():
                results = differentiable(_call(self.model, inputs, recorder))
            if run.stopped:
                results = run.ends.pop()
            parameters = self._parameters()
            run.backward(results, emulation.parameters(parameters) if emulation else parameters)
        return run.result

    def _parameters(self) -> list[nn.Parameter]:
        """Trainable parameters around the blocks."""
        own = {id(p): p for _, module in self.owners for p in module.parameters() if p.requires_grad}
        return list(own.values())


class _Run:
    """The state of one run."""

    def __init__(self, skeleton: Skeleton, recorder: Recorder, stops_at_block: bool) -> None:
        self.skeleton, self.recorder, self.stops_at_block = skeleton, recorder, stops_at_block
        self.stopped = False
        self.recorded: dict[Hashable, BlockCall] = {}
        """One call of each kind: others are given the same tensors."""
        self.result = SkeletonRun([Trace()])
        self.latest: list[Tensor] = []
        """Differentiable outputs of the latest stub."""
        self.ends: list[list[Tensor]] = []
        """Where backward enters each stretch but the last."""
        self.starts: list[list[Tensor]] = [[]]
        """Where it leaves each stretch: at the outputs of the block before, and at its inputs where these go on."""
        recorder.trace = self.result.stretches[0]
        recorder.used = self._note_use

    def _note_use(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self.recorder.parameter_keys:
            self.result.uses.setdefault(key, set()).add(len(self.result.stretches) - 1)

    # -- forward

    @contextmanager
    def stubs(self) -> Iterator[None]:
        """Replaces the blocks' forward within."""
        blocks = self.skeleton.blocks
        for name, block in blocks:
            block.__dict__["forward"] = self._stub(name, block)
        try:
            yield
        finally:
            for _, block in blocks:
                block.__dict__.pop("forward", None)

    def _stub(self, name: str, block: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.recorder.trace = None
            call = self._recorded(name, args, kwargs)
            self._enter(call, args, kwargs)
            self.result.calls.append(call)
            if self.stops_at_block:
                self.stopped = True
                raise _Stopped
            output = fresh(self._example(block, call))
            self.latest = differentiable(output)
            call.output_bytes = sum(t.numel() * t.element_size() for t in self.latest[:1])
            self.starts.append([*self.latest, *(t for t in tensors_in((args, kwargs)) if t.requires_grad)])
            trace = Trace()
            trace.expect(output, self.latest[0] if self.latest else None)
            self.result.stretches.append(trace)
            self.recorder.trace = trace
            return output

        return forward

    def _recorded(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        leaves, spec = tree_flatten((args, kwargs))
        numbers = tuple(leaf if isinstance(leaf, (int, float)) else None for leaf in leaves)
        kind = (self.skeleton.kinds.get(name, name), str(spec), tuple(map(_leaf, leaves)))
        same = self.recorded.get((kind, numbers))
        if same is not None:
            return BlockCall(name, same.args, same.kwargs, kind, numbers)
        call = BlockCall(name, detached(args), detached(kwargs), kind, numbers)
        self.recorded[kind, numbers] = call
        return call

    def _enter(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes where backward leaves the block, and which argument comes from the block before."""
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        trace = self.result.stretches[-1]
        if not self.result.calls:
            self.ends.append([tensor for tensor in tensors_in(given) if tensor.requires_grad])
            trace.output_key = next(map(storage_key, self.ends[-1]), None)
            return
        identical = {id(tensor) for tensor in self.latest}
        call.activation = next((key for key, value in given.items() if id(value) in identical), None)
        if call.activation is not None:
            self.ends.append([])
            return
        candidates = [key for key, value in given.items() if isinstance(value, Tensor) and value.requires_grad]
        call.activation = next((key for key in candidates if _depends(given[key], self.latest)), None)
        self.ends.append([given[call.activation]] if call.activation is not None else [])
        trace.output_key = next(map(storage_key, self.ends[-1]), None)

    def _example(self, block: nn.Module, call: BlockCall) -> Any:
        """The block's output for such a call, shapes only."""
        if call.kind not in self.skeleton.outputs:
            own = block.__dict__.pop("forward")
            saved, self.recorder.modules = self.recorder.modules, []
            try:
                self.skeleton.outputs[call.kind] = detached(own_forward(block)(*call.args, **call.kwargs))
            finally:
                block.__dict__["forward"], self.recorder.modules = own, saved
        return self.skeleton.outputs[call.kind]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes the calls of the modules around the blocks, and attributes operators to them."""
        with ExitStack() as stack:
            for name, module in self.skeleton.owners:
                handle = module.register_forward_pre_hook(self._note_call(name), with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            stack.enter_context(self.recorder.naming(_around(self.skeleton)))
            yield

    def _note_call(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trace, self.recorder.trace = self.recorder.trace, None
            given = {str(i): value for i, value in enumerate(args)} | kwargs
            first = next((key for key, value in given.items() if isinstance(value, Tensor)), None)
            call = ModuleCall(name, detached(args), detached(kwargs), first)
            self.result.module_calls.setdefault(name, (len(self.result.stretches) - 1, call))
            self.recorder.trace = trace

        return note

    # -- backward

    def backward(self, results: list[Tensor], parameters: list[nn.Parameter]) -> None:
        """Traces the stretches backward, the last one first. Empties `results`."""
        self.recorder.used = None
        self.latest = []
        self.ends.append(results)
        while self.ends:
            ends, starts, stretch = self.ends.pop(), self.starts.pop(), len(self.ends)
            self.recorder.trace = self.result.stretches[stretch]
            used = [p for p in parameters if stretch in self.result.uses.get(storage_key(p), ())]
            self.recorder.backward(ends, starts, used)
        for first, second in zip(self.result.calls[:1], self.result.calls[1:2], strict=False):
            first.activation = second.activation if second.activation in first.arguments else None


class _Stopped(Exception):
    """Leaves a forward at its first block."""


# ----------------------------------------------------------------------------------------------- helpers


def own_forward(block: nn.Module) -> Any:
    """The block's forward as its class defines it, hooks left out."""
    return type(block).forward.__get__(block)


def _around(skeleton: Skeleton) -> list[Named]:
    """All modules outside of the blocks."""
    inside = tuple(f"{name}." for name, _ in skeleton.blocks)
    blocks = {name for name, _ in skeleton.blocks}
    named = skeleton.model.named_modules()
    return [(name, m) for name, m in named if name and name not in blocks and not name.startswith(inside or ("\0",))]


def _call(model: nn.Module, inputs: Mapping[str, Tensor], recorder: Recorder) -> Any:
    try:
        return model(**inputs)
    except _Stopped:
        return None
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_forward_failed(model, inputs, recorder, error)) from error


def _forward_failed(model: nn.Module, inputs: Mapping[str, Tensor], recorder: Recorder, error: Exception) -> str:
    given = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODEL)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    module = f" in module {recorder.modules[-1]!r}" if recorder.modules else ""
    reason = f"{type(error).__name__}: {str(error).strip()}"
    hint = " (galv runs it on meta tensors, so its control flow may not depend on data)" if "meta" in reason else ""
    return f"the forward of {type(model).__name__} with {given} failed{module}{where}: {reason}{hint}"


def _depends(tensor: Tensor, sources: list[Tensor]) -> bool:
    """Whether `tensor` was computed from one of `sources`."""
    wanted = {id(source) for source in sources}
    pending, seen = [tensor.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        pending += [following for following, _ in node.next_functions]
    return False


def detached(value: Any) -> Any:
    """`value` with every tensor cut from its graph; those that needed a gradient still do."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


def fresh(value: Any) -> Any:
    """`value` with new tensors like those in it."""

    def like(tensor: Tensor) -> Tensor:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return new.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, like, value)


def differentiable(output: Any) -> list[Tensor]:
    """What training differentiates in a model's or block's output: its loss where it has one, else all that can be."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return [loss]
    leaves = tree_flatten(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _leaf(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    return value if value is None or isinstance(value, (bool, str)) else type(value).__qualname__
