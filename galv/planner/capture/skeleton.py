"""Runs the whole model once with a stub in each block's place, and keeps what happens around the blocks.

A stub notes the arguments that its block gets and returns tensors of the right shapes, which are computed once for
each kind of call; so the cost hardly grows with depth. For autograd a stub is one node, so backward runs through the
whole model too. What is executed between two stubs, or from one marked module to the next, is a stretch; an operator
of backward belongs to the stretch whose forward made its autograd node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from galv.errors import ModelError
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.device import meta_as
from galv.planner.capture.emulate import Emulation
from galv.planner.capture.failure import explained
from galv.planner.capture.sample import ModuleCall
from galv.planner.capture.trace import Recorder, Trace
from galv.storages import storage_key, tensors_in

Named = tuple[str, nn.Module]
Outputs = dict[Hashable, Any]
"""Example outputs of blocks by kind of block and call: filled by one run, used by the next."""
Substitute = Callable[..., Any]
"""What an opaque block returns for given arguments, on the meta device."""


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
    before: int
    """The stretch that ends with the call; the next one begins with it."""
    activation: str | None = None
    """The argument that carries the output of the unit before; the same one for all calls of modules of one type."""
    output_bytes: int = 0
    """Bytes of the first differentiable output."""
    origins: dict[str, frozenset[int]] = field(default_factory=dict)
    """For each argument, the positions of the calls that it was computed from, nothing but glue in between."""
    makers: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """For each argument, what of it was made around the blocks: (stretch, storage, bytes)."""

    given: set[str] = field(default_factory=set)
    """Arguments that are inputs of the model itself."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by position ("0") or keyword."""
        return {str(i): value for i, value in enumerate(self.args)} | self.kwargs


@dataclass
class SkeletonRun:
    """What one run of the model saw."""

    stretches: list[Trace]
    marks: list[str | None] = field(default_factory=lambda: [None])
    """For each stretch, the mark of the module that began it."""
    calls: list[BlockCall] = field(default_factory=list)
    """In the order of execution."""
    uses: dict[int, set[int]] = field(default_factory=dict)
    """Stretches with operators that take a parameter, by its storage."""
    module_calls: dict[str, tuple[int, ModuleCall]] = field(default_factory=dict)
    """(stretch, first call) of each watched module."""
    has_loss: bool = False
    """Whether the model returns a scalar to differentiate."""


class Skeleton:
    """The model with stubs for `blocks`; `owners` are the modules around them that hold parameters.

    `direct` are parameters that no block or owner holds, `marks` give modules at which a stretch of that name begins,
    and `substitutes` stand for blocks that cannot run on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Named],
        owners: Sequence[Named],
        device: DeviceKind,
        *,
        direct: Sequence[str] = (),
        marks: Mapping[str, str] | None = None,
        substitutes: Mapping[str, Substitute] | None = None,
    ) -> None:
        self.model, self.blocks, self.owners, self.device = model, blocks, owners, device
        self.direct, self.marks, self.substitutes = direct, dict(marks or {}), dict(substitutes or {})
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
        run = _Run(self, recorder, {storage_key(tensor) for tensor in inputs.values()}, stops_at_block)
        values = {inputs[name]: value for name, value in (known or {}).items()}
        with meta_as(self.device, values):
            local = emulation.installed() if emulation else nullcontext()
            with run.stubs(), local, run.watching(), recorder.forward():
                results = differentiable(self._call(inputs, run))
            if not (results or stops_at_block):
                raise ModelError(_without_gradient(self.model))
            run.result.has_loss = len(results) == 1 and results[0].ndim == 0
            parameters = self._parameters()
            run.backward(run.end or results, emulation.parameters(parameters) if emulation else parameters)
        return run.result

    def _call(self, inputs: Mapping[str, Tensor], run: _Run) -> Any:
        try:
            return self.model(**inputs)
        except _Stopped:
            return None
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(explained(self.model, inputs, error, run.recorder.current)) from error

    def _parameters(self) -> list[nn.Parameter]:
        """Trainable parameters around the blocks."""
        own = {id(p): p for _, module in self.owners for p in module.parameters() if p.requires_grad}
        own |= {id(p): p for name in self.direct if (p := self.model.get_parameter(name)).requires_grad}
        return list(own.values())


class _Run:
    """The state of one run."""

    def __init__(self, skeleton: Skeleton, recorder: Recorder, given: set[int], stops_at_block: bool) -> None:
        self.skeleton, self.recorder, self.given, self.stops_at_block = skeleton, recorder, given, stops_at_block
        self.recorded: dict[Hashable, BlockCall] = {}
        """One call of each kind: others are given the same tensors."""
        self.result = SkeletonRun([Trace(given=set(given))])
        self.origins = WeakTensorKeyDictionary()
        """Of tensors around the blocks: the positions of the calls that they were computed from."""
        self.makers: list[int] = []
        """The stretches before the current one that made anything."""
        self.end: list[Tensor] = []
        """Where backward starts when the run stopped at its first block."""
        self.anchor = torch.zeros((), device="meta", requires_grad=True)
        """Makes the outputs of a block with parameters of its own differentiable, whatever it is given."""
        self.first_sequence_numbers = [0]
        recorder.trace = self.result.stretches[0]
        recorder.seen, recorder.elsewhere = self._saw, self._maker

    def _saw(self, inputs: Any, outputs: Any) -> None:
        """Notes which stretch uses a parameter, and which calls the results come from."""
        origins: frozenset[int] = frozenset()
        for tensor in tensors_in(inputs):
            key = storage_key(tensor)
            if key in self.recorder.parameter_keys:
                self.result.uses.setdefault(key, set()).add(len(self.result.stretches) - 1)
            origins |= self.origins.get(tensor, frozenset())
        if origins:
            for tensor in tensors_in(outputs):
                self.origins[tensor] = origins

    def _maker(self, key: int) -> Trace | None:
        """The stretch that made a storage, None for a block's output."""
        if key in self.given:
            return None
        return next((self.result.stretches[i] for i in reversed(self.makers) if self._holds(i, key)), None)

    def _begin(self, mark: str | None, outputs: Any, activation: Tensor | None) -> None:
        """A new stretch begins."""
        if self.result.stretches[-1].memory.events:
            self.makers.append(len(self.result.stretches) - 1)
        trace = Trace(given=set(self.given))
        trace.expect(outputs, activation)
        self.result.stretches.append(trace)
        self.result.marks.append(mark)
        self.first_sequence_numbers.append(torch._C._autograd._get_sequence_nr())
        self.recorder.trace = trace

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
            call = self._noted(name, args, kwargs)
            self.recorder.trace = None
            if self.stops_at_block:
                self.end = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
                raise _Stopped
            output = self._output(block, call, args, kwargs)
            real = differentiable(output)
            call.output_bytes = sum(t.numel() * t.element_size() for t in real[:1])
            for tensor in tensors_in(tree_flatten(output)[0]):
                self.origins[tensor] = frozenset((len(self.result.calls) - 1,))
            self._begin(None, tree_flatten(output)[0], real[0] if real else None)
            return output

        return forward

    def _noted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        self.recorder.trace, trace = None, self.recorder.trace
        leaves, spec = tree_flatten((args, kwargs))
        numbers = tuple(leaf if isinstance(leaf, (int, float)) else None for leaf in leaves)
        kind = (self.skeleton.kinds.get(name, name), str(spec), tuple(map(_leaf, leaves)))
        before = len(self.result.stretches) - 1
        same = self.recorded.get((kind, numbers))
        if same is not None:
            call = BlockCall(name, same.args, same.kwargs, kind, numbers, before)
        else:
            call = BlockCall(name, detached(args), detached(kwargs), kind, numbers, before)
            self.recorded[kind, numbers] = call
        for key, value in ({str(i): value for i, value in enumerate(args)} | kwargs).items():
            call.origins[key] = frozenset().union(*(self.origins.get(t, frozenset()) for t in tensors_in(value)))
            if any(storage_key(tensor) in self.given for tensor in tensors_in(value)):
                call.given.add(key)
            call.makers[key] = [made for tensor in tensors_in(value) if (made := self._made(call, tensor))]
        self.result.calls.append(call)
        self.recorder.trace = trace
        return call

    def _made(self, call: BlockCall, tensor: Tensor) -> tuple[int, int, int] | None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        stretch = next((i for i in (call.before, *reversed(self.makers)) if self._holds(i, key)), None)
        return None if stretch is None else (stretch, key, storage.nbytes())

    def _holds(self, stretch: int, key: int) -> bool:
        return self.result.stretches[stretch].memory.holds(key)

    def _output(self, block: nn.Module, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's output, one node of the autograd graph with everything that the block is given."""
        leaves, spec = tree_flatten(self._example(block, call))
        like = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not like:
            return tree_unflatten(leaves, spec)
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        made = iter(_Block.apply(like, self.anchor, *given))
        return tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def _example(self, block: nn.Module, call: BlockCall) -> Any:
        """The block's output for such a call, shapes only."""
        if call.kind not in self.skeleton.outputs:
            own = block.__dict__.pop("forward")
            seen, self.recorder.seen = self.recorder.seen, None
            forward = self.skeleton.substitutes.get(call.name) or own_forward(block)
            try:
                self.skeleton.outputs[call.kind] = detached(forward(*call.args, **call.kwargs))
            finally:
                block.__dict__["forward"], self.recorder.seen = own, seen
        return self.skeleton.outputs[call.kind]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes the calls of the modules around the blocks, and attributes operators to them."""
        with ExitStack() as stack:
            for name, module in self.skeleton.owners:
                handle = module.register_forward_pre_hook(self._note_call(name), with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            for name, mark in self.skeleton.marks.items():
                module = self.skeleton.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(self._mark(mark), prepend=True).remove)
            stack.enter_context(self.recorder.naming(_around(self.skeleton)))
            yield

    def _mark(self, mark: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if self.result.marks[-1] is None:
                self.result.marks[-1] = mark
            elif self.result.marks[-1] != mark:
                self._begin(mark, (), None)

        return enter

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
        """Traces all of backward. Empties `results`."""
        for trace in self.result.stretches:
            trace.end_forward()
        self.recorder.trace = self.result.stretches[-1]
        self.recorder.stretch_of = self._stretch_of
        gradients = self.recorder.backward(results, [*parameters, self.anchor])
        for trace in self.result.stretches:
            trace.end_backward(gradients[:-1])
        self._settle_activations()

    def _stretch_of(self, sequence_number: int) -> Trace:
        return self.result.stretches[bisect_right(self.first_sequence_numbers, sequence_number) - 1]

    def _settle_activations(self) -> None:
        """Each call's activation: the argument that most calls of such modules get from the call before."""
        votes: dict[type, Counter[str]] = {}
        calls, model = self.result.calls, self.skeleton.model
        kinds = [type(model.get_submodule(call.name)) for call in calls]
        for i, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
            near = [key for key, origins in call.origins.items() if i - 1 in origins and i]
            votes.setdefault(kind, Counter()).update(near[:1])
        for call, kind in zip(calls, kinds, strict=True):
            wanted = [key for key, _ in votes[kind].most_common() if key in call.arguments]
            tensors = [key for key, value in call.arguments.items() if isinstance(value, Tensor)]
            first = [key for key in tensors if call.arguments[key].requires_grad] or tensors
            call.activation = next((key for key in (*wanted, *first) if key in tensors), None)
            for stretch, key, _ in call.makers.get(call.activation or "", ()):
                self.result.stretches[stretch].output_keys.add(key)


class _Stopped(Exception):
    """Leaves a forward at its first block."""


class _Block(torch.autograd.Function):
    """Fresh tensors like the example's, in the place of what a block would compute."""

    @staticmethod
    def forward(ctx: Any, like: list[Tensor], anchor: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.given = [(tensor.shape, tensor.dtype) for tensor in given]
        made = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in like)
        plain = [new for new, old in zip(made, like, strict=True) if not old.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.given]
        return None, None, *grads


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


def _without_gradient(model: nn.Module) -> str:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return f"{type(model).__name__} has no trainable parameters, so there is nothing to plan"
    return (
        f"nothing that {type(model).__name__} returns has a gradient; it must return its loss (or outputs) attached to "
        "its parameters, not detached or computed under torch.no_grad()"
    )


def detached(value: Any) -> Any:
    """`value` with every tensor cut from its graph; those that needed a gradient still do."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


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
