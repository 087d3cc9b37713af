"""Follows one call of one module and keeps what the search needs: operators, and where layouts may change.

The module runs as it is, under `make_fx` ahead of autograd, so a linear layer or fused attention stays one operator.
Where `galv.localize` will hook, every tensor that crosses a module's border, and every own parameter that a module
reads, is led through a marker operator. So what the search decides on is exactly what the runtime can change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from galv.errors import ModelError
from galv.planner.capture.known_values import GroupedProducts
from galv.planner.capture.sample import ModuleCall
from galv.planner.sharding.watch import (
    FunctionCounter,
    Site,
    constants_in,
    counted,
    integers_in,
    paths,
    shapes_in,
    tensors_in,
)

NodeKind = Literal["input", "parameter", "constant", "border", "operator", "result"]

_aten = torch.ops.aten
_WITHOUT_GRADIENT = (_aten.detach.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default)

_FRESH = (_aten.to.dtype, _aten.to.device, _aten.contiguous.default)
"""Views of their input only where nothing had to be done, and then one and the same tensor."""

_library = torch.library.Library("galv", "FRAGMENT")
_library.define("marker(Tensor x, int record) -> Tensor")
_library.impl("marker", lambda x, record: _aten.alias.default(x), "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Input:
    """A tensor among the call's arguments; `name` is the position or keyword of the argument that holds it."""

    name: str


@dataclass(frozen=True)
class Border:
    """A tensor that enters or leaves a module, as the module's hooks see it; `name` is its position or keyword."""

    module: str
    side: Literal["inputs", "outputs"]
    name: str


@dataclass(frozen=True)
class OwnParameter:
    """A parameter as its own module reads it."""

    module: str
    name: str
    identity: int
    """Equal for the names of one tied parameter."""
    trainable: bool

    @property
    def path(self) -> str:
        """Name within the unit."""
        return ".".join(part for part in (self.module, self.name) if part)


@dataclass(frozen=True)
class Result:
    """A tensor that the call returns, by position among its tensors."""

    position: int


@dataclass(frozen=True, eq=False)
class Node:
    """A value of the call and what made it. A tuple of tensors is one value, `operator.getitem` takes it apart."""

    index: int
    kind: NodeKind
    inputs: tuple[int, ...]
    """The tensors it is made from, in the order of the arguments."""
    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool
    mark: Input | Border | OwnParameter | Result | None = None
    target: fx.Node | None = None
    """For operators: the aten call with its arguments."""

    @property
    def num_bytes(self) -> int:
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(eq=False)
class Call:
    """One torch function that a module called, and the nodes that it returned."""

    site: Site
    constants: tuple[float | bool, ...]
    integers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors among the arguments."""
    results: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Trace:
    """One module's call as a graph in the order of execution."""

    name: str
    """The module within the unit."""
    module: nn.Module
    call: ModuleCall
    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    hazards: tuple[str, ...]
    """What keeps the graph from telling the truth, in words."""

    def nodes_of(self, kind: NodeKind) -> list[Node]:
        return [node for node in self.nodes if node.kind == kind]


def trace_call(call: ModuleCall, module: nn.Module) -> Trace:
    """The graph of `call` on `module`.

    Raises ModelError when the module cannot run on the meta device.
    """
    recorder = _Recorder(call.module, module)
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))

    def run(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], spec)
        return recorder.run(args, kwargs)

    try:
        with torch.enable_grad(), GroupedProducts():
            graph = make_fx(run, tracing_mode="real", pre_dispatch=True)(*(x.detach() for x in tensors_in(leaves)))
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{type(module).__name__} cannot be traced on the meta device: {first}") from error
    reader = _Reader(recorder.records, graph, module, _inputs(call))
    return Trace(call.module, module, call, reader.read(), tuple(recorder.calls), tuple(reader.hazards))


def _inputs(call: ModuleCall) -> Iterator[tuple[Input, bool]]:
    """For each tensor among the arguments: the argument that holds it, and whether its gradient is wanted."""
    arguments = [(str(i), value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
    for name, value in arguments:
        for tensor in tensors_in(value):
            yield Input(name), tensor.requires_grad or name == call.activation


# ----------------------------------------------------------------------------------------------- while it runs


class _Recorder:
    """Runs the module and numbers what crosses its borders and which functions it calls."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.records: list[Border | OwnParameter | Result | Call] = []
        """What each marker stands for."""
        self.calls: list[Call] = []
        self._marked_tensors: list[Tensor] = []
        self._counter = FunctionCounter(self._watch)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Every marked tensor: what a graph returns, it keeps."""
        with self._counter, counted(self.name, self.module, self._counter), self._marking():
            output = self.module(*args, **kwargs)
            for position, tensor in enumerate(tensors_in(output)):
                self._mark(tensor, Result(position))
        return self._marked_tensors

    def _mark(self, tensor: Tensor, record: Border | OwnParameter | Result | Call) -> Tensor:
        self.records.append(record)
        with self._counter.paused():
            marked: Tensor = torch.ops.galv.marker(tensor, len(self.records) - 1)
        self._marked_tensors.append(marked)
        return marked

    def _watch(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        with self._counter.paused():
            everything = (args, kwargs)
            call = Call(site, constants_in(everything), integers_in(everything), shapes_in(everything))
        self.calls.append(call)
        output = func(*args, **kwargs)
        for tensor in tensors_in(output):
            self._mark(tensor, call)
        return output

    @contextmanager
    def _marking(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in paths(self.name, self.module):
                before = module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
                after = module.register_forward_hook(partial(self._after, path))
                stack.callback(before.remove)
                stack.callback(after.remove)
                stack.callback(_unhide, module)
            yield

    def _before(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = OwnParameter(path, name, id(parameter), parameter.requires_grad)
            module.__dict__[name] = self._mark(parameter, own)  # hides the registered one, as `galv.localize` does
        args = tuple(self._cross(value, Border(path, "inputs", str(i))) for i, value in enumerate(args))
        return args, {key: self._cross(value, Border(path, "inputs", key)) for key, value in kwargs.items()}

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> Any:
        _unhide(module)
        if isinstance(output, tuple):
            return tuple(self._cross(value, Border(path, "outputs", str(i))) for i, value in enumerate(output))
        return self._cross(output, Border(path, "outputs", "0"))

    def _cross(self, value: Any, border: Border) -> Any:
        return self._mark(value, border) if isinstance(value, Tensor) else value


def _unhide(module: nn.Module) -> None:
    for name, _ in module.named_parameters(recurse=False):
        module.__dict__.pop(name, None)


# ----------------------------------------------------------------------------------------------- the finished graph


class _Reader:
    """Turns the graph that `make_fx` made into nodes."""

    def __init__(
        self, records: list[Any], graph: fx.GraphModule, module: nn.Module, inputs: Iterator[tuple[Input, bool]]
    ) -> None:
        self.records, self.graph, self.inputs = records, graph, inputs
        self.hazards: list[str] = []
        self._nodes: list[Node] = []
        self._index: dict[fx.Node, int] = {}
        self._parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        self._grad_enabled = True

    def read(self) -> tuple[Node, ...]:
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                mark, wanted = next(self.inputs)
                self._add(node, "input", differentiable=wanted, mark=mark)
            elif node.target is torch._C._set_grad_enabled:
                self._grad_enabled = bool(node.args[0])
            elif node.target is torch.ops.galv.marker.default:
                self._marker(node, self.records[node.args[1]])
            elif node.op == "call_function" and _values(node):
                self._operator(node)
        return tuple(self._nodes)

    def _marker(self, node: fx.Node, record: Any) -> None:
        if isinstance(record, OwnParameter):
            self._add(node, "parameter", differentiable=record.trainable, mark=record)
            return
        source = self._source(node.args[0])
        if isinstance(record, Call):
            record.results.append(source)
            return
        kind: NodeKind = "border" if isinstance(record, Border) else "result"
        self._add(node, kind, (source,), differentiable=self._nodes[source].differentiable, mark=record)

    def _operator(self, node: fx.Node) -> None:
        inputs = tuple(self._source(x) for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, fx.Node))
        if _is_mutable(node) and inputs and _is_view(self._nodes[inputs[0]].target):
            self.hazards.append(f"{node.target} writes into a view, which changes another tensor unseen")
        flows = self._grad_enabled and any(self._nodes[i].differentiable for i in inputs)
        self._add(node, "operator", inputs, differentiable=flows and node.target not in _WITHOUT_GRADIENT)

    def _source(self, node: Any) -> int:
        """The index of the value of `node`; attributes become constants when first used."""
        if node not in self._index:
            value = operator.attrgetter(node.target)(self.graph)
            if id(value) in self._parameters:
                name = self._parameters[id(value)]
                self.hazards.append(f"{name} is read while its own module is not running, so it cannot be made local")
            node.meta["val"] = value
            self._add(node, "constant", differentiable=False)
        return self._index[node]

    def _add(
        self, node: fx.Node, kind: NodeKind, inputs: tuple[int, ...] = (), *, differentiable: bool, mark: Any = None
    ) -> None:
        value = _values(node)[0]
        made = Node(
            index=len(self._nodes),
            kind=kind,
            inputs=inputs,
            shape=tuple(value.shape),
            itemsize=value.element_size(),
            differentiable=differentiable and value.is_floating_point(),
            mark=mark,
            target=node,
        )
        self._nodes.append(made)
        self._index[node] = made.index


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_view(node: fx.Node | None) -> bool:
    """Whether the node's value shares memory with its input."""
    schema = getattr(node.target, "_schema", None) if node is not None else None
    alias = schema.returns[0].alias_info if schema is not None and schema.returns else None
    return alias is not None and not alias.is_write and node is not None and node.target not in _FRESH


def _values(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))
