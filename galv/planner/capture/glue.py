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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from galv.errors import ModelError
from galv.planner.plan import Plan, Precision

_META = torch.device("meta")
_TORCH = str(Path(torch.__file__).parent)
_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def trace_glue(
    model: nn.Module, leaves: Sequence[str], inputs: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """The forward of `model` with every module named in `leaves` as one call_module node, the rest as aten operators.

    Placeholders are the names of `inputs`, which the model receives as keywords; the output is the scalar loss
    (`output.loss`, `output["loss"]`, a scalar output) or else the output tensor. Buffers used between the leaves are
    get_attr nodes by their own name, other constants `_constant<i>`. `node.meta["val"]` is the value on the meta
    device and `node.meta["grad"]` whether a gradient flows into it. Sizes, also the batch size, are those of `inputs`,
    and factories ask for the meta device: both are for the caller to settle. `dtype` is what parameters are computed
    in, when not their own. Nothing of the model changes, wherever it lies; its modules are called in training mode.

    Raises ModelError naming the module and line when the forward cannot be followed.
    """
    tracer = _Tracer(model, dtype)
    sources = {name: tracer.placeholder(name, value) for name, value in inputs.items()}
    with _training(model), _without_cache(model), _stubs(model, leaves, tracer), tracer, _MetaConstants():
        try:
            output = torch.func.functional_call(model, tracer.tensors, args=(), kwargs=sources)
        except Exception as error:
            raise ModelError(_explanation(model, error)) from error
    tracer.graph.output(tracer.node_of(_result(model, output)))
    return _finished(model, tracer)


def glue_for(model: nn.Module, plan: Plan) -> fx.GraphModule:
    """`trace_glue` as the plan's pipeline needs it: around its units, for one microbatch, in its precision."""
    leaves = [module for unit in plan.units() for module in unit.modules]
    compute = _DTYPES[plan.training.precision]
    inputs = {}
    for spec in plan.model.inputs:
        dtype = getattr(torch, spec.dtype)
        shape = plan.model.input_shape(spec, plan.micro_batch)
        inputs[spec.name] = torch.empty(shape, dtype=compute if dtype.is_floating_point else dtype, device=_META)
    return trace_glue(model, leaves, inputs, dtype=compute)


def _finished(model: nn.Module, tracer: _Tracer) -> fx.GraphModule:
    """The graph over the model's own modules and buffers, without what nothing uses."""
    root: dict[str, Any] = dict(tracer.constants)
    buffers = dict(model.named_buffers())
    for node in tracer.graph.nodes:
        if node.op == "call_module":
            root[node.target] = model.get_submodule(node.target)
        elif node.op == "get_attr" and node.target in buffers:
            root[node.target] = buffers[node.target]
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

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        """Meta twins of the model's parameters and buffers."""
        self._known: dict[int, tuple[Tensor, fx.Node]] = {}
        """By identity; the tensor is held so that no other one can take its place."""
        self._parameters: dict[int, str] = {}
        self._buffers: dict[int, tuple[str, Tensor]] = {}
        self._paused = False
        for name, parameter in model.named_parameters():
            self.tensors[name] = _meta_parameter(parameter, dtype)
            self._parameters[id(self.tensors[name])] = name
        for name, buffer in model.named_buffers():
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
        with self._pause(), torch.no_grad():
            output = forward(*args, **kwargs)
            output = pytree.tree_map_only(Tensor, functools.partial(_fresh, grad=grad), output)
        return self._track_tree(node, output, grad=grad)

    # -- nodes of values

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that computes `tensor`, made now when it is a buffer or a constant."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if id(tensor) in self._parameters:
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
        node = self.graph.create_node("get_attr", name)
        self._track(node, tensor, grad=False)
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

    def _track_tree(self, node: fx.Node, output: Any, *, grad: bool) -> Any:
        """`output`, every tensor in it known as the part of `node` that it is."""
        if isinstance(output, Tensor):
            with self._pause():
                return self._track(node, output, grad=grad)
        node.meta.update(val=None, grad=False)
        for path, value in pytree.tree_flatten_with_path(output)[0]:
            if isinstance(value, Tensor):
                part = functools.reduce(self._part, path, node)
                with self._pause():
                    self._track(part, value, grad=grad)
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

    def _value(self, node: fx.Node) -> Any:
        """The value of `node` on the CPU. Raises ModelError when it depends on inputs or weights."""
        if node.op == "get_attr" and node.target in self.constants:
            return self.constants[node.target]
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
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with self._pause(), torch.no_grad():
            return function(*args, **kwargs)


def _fresh(tensor: Tensor, *, grad: bool) -> Tensor:
    """The tensor without history, as a leaf that asks for a gradient where one flows."""
    return tensor.detach().requires_grad_(grad and tensor.is_floating_point())


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
    names = {id(module): name for name, module in model.named_modules()}
    place, trace = type(model).__name__, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        owner = trace.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if id(owner) in names and not code.co_filename.startswith(_TORCH):
            place = f"{names[id(owner)] or 'the model'} ({type(owner).__name__}), {code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"cannot follow the forward of {type(model).__name__}: {error}\n  in {place}"
