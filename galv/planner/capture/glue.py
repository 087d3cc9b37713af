"""The model's own forward as a graph in which chosen modules are single, opaque calls.

Only what lies *between* the chosen modules is traced: position ids, masks, rotary tables, the loss. A stub in each
module's place computes shapes on the meta device and records one call, so tracing costs the same few operators for 4
layers and for 400. The forward runs as eager training would run it: unlike `torch.export` it leaves the model unaware
of being traced, so that Hugging Face models keep fused causal attention instead of building explicit masks.
Values that steer Python (`if mask.all():`) are computed when they follow from constants and refused otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from galv.errors import ModelError
from galv.planner.capture.failure import place_of
from galv.planner.capture.known_values import KnownValues
from galv.planner.capture.opaque import Opaque
from galv.planner.plan import Plan, Precision

_META = torch.device("meta")
_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


Example = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What a leaf, given by name and forward, returns for meta tensors."""


def trace_glue(
    model: nn.Module,
    leaves: Sequence[str],
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    direct: Sequence[str] = (),
    example: Example | None = None,
) -> fx.GraphModule:
    """The forward of `model` with every module named in `leaves` as one call_module node, the rest as aten operators.

    Placeholders are the names of `inputs`, which the model receives as keywords; the output is the scalar loss
    (`output.loss`, `output["loss"]`, a scalar output) or else the output tensor. Buffers used between the leaves are
    get_attr nodes by their own name, other constants `_constant<i>`. `node.meta["val"]` is the value on the meta
    device and `node.meta["grad"]` whether a gradient flows into it. Sizes, also the batch size, are those of `inputs`,
    and factories ask for the meta device: both are for the caller to settle. `dtype` is what parameters are computed
    in, when not their own. `direct` are parameters that may be used between the leaves, as get_attr nodes, and
    `example` answers in a leaf's place, so that equal leaves need to run only once. Nothing of the model changes,
    wherever it lies; its modules are called in training mode.

    Raises ModelError naming the module and line when the forward cannot be followed.
    """
    tracer = _Tracer(model, dtype, frozenset(direct), example, () if dtype else leaves)
    sources = {name: tracer.placeholder(name, value) for name, value in inputs.items()}
    with (
        _training(model),
        _without_cache(model),
        _stubs(model, leaves, tracer),
        _functions(tracer),
        tracer,
        _MetaConstants(),
    ):
        try:
            output = torch.func.functional_call(model, tracer.tensors, args=(), kwargs=sources)
        except Exception as error:
            raise ModelError(_explanation(model, error)) from error
    tracer.graph.output(tracer.node_of(_result(model, output)))
    return _finished(model, tracer)


def glue_for(model: nn.Module, plan: Plan, num_samples: int | None = None) -> fx.GraphModule:
    """`trace_glue` as the plan needs it: around its units, in its precision, for `num_samples` (one microbatch)."""
    leaves = [module for unit in plan.units() for module in unit.modules]
    direct = [name for unit in plan.units() for name in unit.parameters]
    compute = _DTYPES[plan.training.precision]
    inputs = {}
    for spec in plan.model.inputs:
        dtype = getattr(torch, spec.dtype)
        shape = plan.model.input_shape(spec, num_samples or plan.micro_batch)
        inputs[spec.name] = torch.empty(shape, dtype=compute if dtype.is_floating_point else dtype, device=_META)
    opaque = [name for unit in plan.units() if unit.is_opaque for name in unit.modules]
    example = _with_opaque(model, opaque, compute) if opaque else None
    return trace_glue(model, leaves, inputs, dtype=compute, direct=direct, example=example)


def _with_opaque(model: nn.Module, names: Sequence[str], dtype: torch.dtype) -> Example:
    stand_ins = {name: Opaque(name, model.get_submodule(name), dtype) for name in names}

    def example(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return stand_ins.get(name, forward)(*args, **kwargs)

    return example


def _finished(model: nn.Module, tracer: _Tracer) -> fx.GraphModule:
    """The graph over the model's own modules and buffers, without what nothing uses."""
    root: dict[str, Any] = dict(tracer.constants)
    buffers = dict(model.named_buffers())
    for node in tracer.graph.nodes:
        if node.op == "call_module":
            root[node.target] = model.get_submodule(node.target)
        elif node.op == "get_attr" and node.target in buffers:
            root[node.target] = buffers[node.target]
        elif node.op == "get_attr" and node.target not in root:
            root[node.target] = model.get_parameter(node.target)
    traced = fx.GraphModule(root, tracer.graph, type(model).__name__)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _result(model: nn.Module, output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    result = output if loss is None else loss
    if isinstance(result, Tensor):
        return result
    raise ModelError(
        f"{type(model).__name__} returns {type(output).__name__}, which holds no loss; it must return a tensor or "
        'something with the loss as `.loss` or ["loss"] (Hugging Face models do when they are given `labels`)'
    )


# ----------------------------------------------------------------------------------------------- the tracer


class _Tracer(TorchDispatchMode):
    """Records aten calls on meta tensors, and calls of leaves, as nodes of `graph`."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        direct: frozenset[str],
        example: Example | None,
        as_they_are: Sequence[str],
    ) -> None:
        super().__init__()
        self.direct, self.example = direct, example
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        """Meta twins of the model's parameters and buffers, but for what lies on the meta device within a leaf."""
        self._known: dict[int, tuple[Tensor, fx.Node]] = {}
        """By identity; the tensor is held so that no other one can take its place."""
        self._parameters: dict[int, str] = {}
        self._buffers: dict[int, tuple[str, Tensor]] = {}
        self._changes: dict[int, fx.Node] = {}
        """The latest operator that changed a storage in place."""
        self._paused = False
        own = tuple(f"{name}." for name in as_they_are)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and name.startswith(own):
                continue
            self.tensors[name] = _meta_parameter(parameter, dtype)
            self._parameters[id(self.tensors[name])] = name
        for name, buffer in model.named_buffers():
            if buffer.is_meta and name.startswith(own):
                continue
            self.tensors[name] = buffer.detach().to(_META, copy=True)
            self._buffers[id(self.tensors[name])] = (name, buffer)

    def placeholder(self, name: str, value: Tensor) -> Tensor:
        """The meta twin of an input, known to the graph as `name`."""
        node = self.graph.placeholder(name)
        return self._track(node, value.detach().to(_META, copy=True), grad=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value(self.node_of(args[0])).item()
        node_args, node_kwargs = self._as_nodes((args, kwargs))
        output = _on_one_device(func, args, kwargs)
        node = self.graph.call_function(func, node_args, node_kwargs)
        for tensor in _written(func, args, kwargs):
            self._changes[tensor.untyped_storage()._cdata] = node
        flows = func is not torch.ops.aten.detach.default
        return self._track_tree(node, output, grad=flows and any(s.meta["grad"] for s in node.all_input_nodes))

    def leaf(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, *, trains: bool) -> Any:
        """What `forward` returns for meta tensors, recorded as one call of the module `name`.

        `trains`: whether the module has parameters with gradients.
        """
        if self._paused:
            return forward(*args, **kwargs)
        node_args, node_kwargs = self._as_nodes((args, kwargs))
        node = self.graph.call_module(name, node_args, node_kwargs)
        grad = torch.is_grad_enabled() and (trains or any(source.meta["grad"] for source in node.all_input_nodes))
        # With autograd on, for some outputs may need no gradient though the module trains.
        with self._pause(), KnownValues():
            output = self.example(name, forward, args, kwargs) if self.example else forward(*args, **kwargs)
            output = pytree.tree_map_only(Tensor, lambda t: _fresh(t, grad=grad and t.requires_grad), output)
        return self._track_tree(node, output, grad=grad, exact=True)

    def function(self, kind: Any, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What a custom autograd function returns, recorded as one call, so that its own backward is kept."""
        node = self.graph.call_function(_caller(kind), self._as_nodes(args))
        grad = torch.is_grad_enabled() and any(source.meta["grad"] for source in node.all_input_nodes)
        with self._pause():
            output = pytree.tree_map_only(Tensor, lambda t: _fresh(t, grad=grad and t.requires_grad), apply(*args))
        return self._track_tree(node, output, grad=grad, exact=True)

    @property
    def is_paused(self) -> bool:
        return self._paused

    # -- nodes of values

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that computes `tensor`, made now when it is a buffer or a constant."""
        if id(tensor) in self._known:
            return self._after_changes(tensor, self._known[id(tensor)][1])
        if id(tensor) in self._parameters:
            if self._parameters[id(tensor)] in self.direct:
                return self._attribute(self._parameters[id(tensor)], tensor, grad=tensor.requires_grad)
            raise ModelError(
                f"parameter {self._parameters[id(tensor)]!r} is used outside of the modules that hold parameters, "
                "so no unit can own it; move it and its use into a module of its own"
            )
        if id(tensor) in self._buffers:
            name = self._buffers[id(tensor)][0]
        elif tensor.device == _META:
            raise ModelError(
                f"a tensor of shape {tuple(tensor.shape)} without values is neither an input nor a buffer nor computed "
                "from them; register it as a buffer"
            )
        else:
            name = f"_constant{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
        return self._attribute(name, tensor, grad=False)

    def _after_changes(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        """The node of `tensor`; where another view of its memory was changed since, one that waits for the change."""
        change = self._changes.get(tensor.untyped_storage()._cdata)
        if change is None or change is node or change < node:
            return node
        waiting = self.graph.call_function(after, (node, change))
        self._track(waiting, tensor, grad=node.meta["grad"] or change.meta["grad"])
        return waiting

    def _attribute(self, name: str, tensor: Tensor, *, grad: bool) -> fx.Node:
        node = self.graph.create_node("get_attr", name)
        self._track(node, tensor, grad=grad)
        return node

    def _as_nodes(self, tree: Any) -> Any:
        """`tree` with nodes in the place of tensors; without gradient where autograd is off."""

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                node = self.node_of(value)
                return node if torch.is_grad_enabled() or not node.meta["grad"] else self._detached(node)
            if isinstance(value, _PLAIN):
                return value
            raise ModelError(
                f"an argument of type {type(value).__name__} is passed between modules; only tensors, numbers, strings "
                "and tuples, lists and dicts of them can be"
            )

        return pytree.tree_map(convert, tree)

    def _detached(self, node: fx.Node) -> fx.Node:
        detached = self.graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta.update(val=node.meta["val"], grad=False)
        return detached

    def _track(self, node: fx.Node, tensor: Tensor, *, grad: bool) -> Tensor:
        node.meta.update(val=tensor.detach(), grad=grad and (tensor.is_floating_point() or tensor.is_complex()))
        self._known[id(tensor)] = (tensor, node)
        return tensor

    def _track_tree(self, node: fx.Node, output: Any, *, grad: bool, exact: bool = False) -> Any:
        """`output`, every tensor in it known as the part of `node` that it is.

        `exact`: tensors say themselves whether they need the gradient; below autograd they do not know yet.
        """
        if isinstance(output, Tensor):
            with self._pause():
                return self._track(node, output, grad=grad and (output.requires_grad or not exact))
        node.meta.update(val=None, grad=False)
        for path, value in pytree.tree_flatten_with_path(output)[0]:
            if isinstance(value, Tensor):
                part = functools.reduce(self._part, path, node)
                with self._pause():
                    self._track(part, value, grad=grad and (value.requires_grad or not exact))
        return output

    def _part(self, node: fx.Node, key: Any) -> fx.Node:
        if isinstance(key, pytree.GetAttrKey):
            part = self.graph.call_function(getattr, (node, key.name))
        else:
            index = key.idx if isinstance(key, pytree.SequenceKey) else key.key
            part = self.graph.call_function(operator.getitem, (node, index))
        part.meta.update(val=None, grad=False)
        return part

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- values that steer Python

    def _value(self, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
        """The value of `node` on the CPU. Raises ModelError when it depends on inputs or weights.

        `known` are those found on the way: what changes memory in place must change what others see.
        """
        known = {} if known is None else known
        if node not in known:
            known[node] = self._computed(node, known)
        return known[node]

    def _computed(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr" and node.target in self.constants:
            return self.constants[node.target].clone()
        if node.op == "get_attr" and node.target in self.direct:
            raise ModelError(f"the forward branches on the values of the parameter {node.target!r}")
        if node.op == "get_attr" and (buffer := dict(self._buffers.values())[str(node.target)]).device != _META:
            return buffer.cpu()
        if node.op != "call_function":
            what = {"placeholder": "input", "get_attr": "buffer", "call_module": "output of"}[node.op]
            raise ModelError(
                f"the forward branches on values computed from the {what} {node.target!r}, which are not known before "
                "the run"
            )
        function: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            raise ModelError(f"the forward branches on random numbers, made by {function}")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._value(source, known))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with self._pause(), torch.no_grad():
            return function(*args, **kwargs)


def after(value: Tensor, change: Any) -> Tensor:
    """`value`, to be used when `change` is done."""
    return value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of `func` changes in place."""
    arguments = func._schema.arguments
    named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in pytree.tree_leaves(named.get(argument.name)) if isinstance(x, Tensor))


@functools.cache
def _caller(kind: Any) -> Callable[..., Any]:
    """`kind.apply` as a function that code can name."""

    def call(*args: Any) -> Any:
        return kind.apply(*args)

    call.__name__ = call.__qualname__ = kind.__name__
    call.__module__ = kind.__module__
    return call


def _fresh(tensor: Tensor, *, grad: bool) -> Tensor:
    """A tensor of its own without history; where a gradient flows, it asks for one and may be changed in place."""
    if not (grad and (tensor.is_floating_point() or tensor.is_complex())):
        return tensor.detach()
    with torch.enable_grad():
        made = _Made.apply(tensor.detach().requires_grad_())
    assert isinstance(made, Tensor)
    return made


class _Made(torch.autograd.Function):
    """A tensor like the one given that is neither a leaf of the autograd graph nor a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _on_one_device(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of its arguments, constants on the CPU moved to the meta device when others are there."""
    if any(isinstance(value, Tensor) and value.device == _META for value in pytree.tree_leaves((args, kwargs))):
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(_META) if x.ndim else x, (args, kwargs))
    return func(*args, **kwargs)


def _meta_parameter(parameter: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    used = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(torch.empty_like(parameter, device=_META, dtype=used), parameter.requires_grad)


class _MetaConstants(TorchFunctionMode):
    """Keeps the values of `torch.tensor(3.0, device="meta")`, which torch would drop before any mode sees them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is Tensor.new_tensor and args[0].device == _META:
            kwargs.setdefault("dtype", args[0].dtype)
            device = torch.device(kwargs.pop("device", None) or _META)
            return torch.tensor(*args[1:], **kwargs).to(device)
        return func(*args, **kwargs)


# ----------------------------------------------------------------------------------------------- the model meanwhile


@contextlib.contextmanager
def _stubs(model: nn.Module, leaves: Sequence[str], tracer: _Tracer) -> Iterator[None]:
    """Puts a recording stub in the place of each leaf's forward."""
    if "" in leaves:
        raise ModelError(f"{type(model).__name__} has no modules around which a graph could be traced")
    modules = {name: model.get_submodule(name) for name in leaves}
    try:
        for name, module in modules.items():
            module.forward = _stub(tracer, name, module)
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def _functions(tracer: _Tracer) -> Iterator[None]:
    """Has the calls of custom autograd functions recorded within."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(own.__func__, kind, **kwargs)
        return original(*args) if tracer.is_paused or kwargs else tracer.function(kind, original, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def _stub(tracer: _Tracer, name: str, module: nn.Module) -> Callable[..., Any]:
    forward, trains = module.forward, any(parameter.requires_grad for parameter in module.parameters())

    @functools.wraps(forward)
    def stub(*args: Any, **kwargs: Any) -> Any:
        return tracer.leaf(name, forward, args, kwargs, trains=trains)

    return stub


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Switches off the key-value cache of Hugging Face models: an object, of no use in training."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    cached = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True


def _explanation(model: nn.Module, error: Exception) -> str:
    """Where in the model's own code `error` arose: the module and the line of the innermost forward."""
    name, module, line = place_of(model, error)
    place = f"{name or 'the model'} ({type(module).__name__}), {line}"
    return f"cannot follow the forward of {type(model).__name__}: {error}\n  in {place}"
