"""How a unit's parameters and activations lie on the tensor axis, with real collectives.

Parameters become DTensors stored as the unit's `TensorParallelLayout` says; `galv.localize` makes the modules compute
on local tensors; this module gives it the hand that moves tensors between ranks, made of DTensor's own redistribution
(Megatron-LM's f, g and their sequence-parallel kin, arXiv 1909.08053 and 2205.05198, are cases of it).

Cut chunk by chunk (`S0x3`), a parameter's DTensor is plainly sharded, but of the parameter with the dim's parts in
another order: `cut` and `joined` translate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from galv.errors import RunError
from galv.localize import Redistribute, localize
from galv.planner.plan import Layout, Redistribution, TensorParallelLayout, Unit, absolute_name
from galv.runtime.randomness import ShardRegions
from galv.runtime.ties import Ties

REPLICATED = Layout(kind="R")

# ----------------------------------------------------------------------------------------------- parameters


def cut(full: Tensor, layout: Layout, degree: int, rank: int) -> Tensor:
    """The part of `full` that `rank` of `degree` holds under an R or S layout, a view where possible."""
    if layout.kind != "S":
        return full
    dim = _dim(layout)
    if full.shape[dim] % (layout.chunks * degree):
        raise RunError(
            f"dim {dim} of a tensor of shape {tuple(full.shape)} cannot be cut into {layout.chunks} x {degree} equal "
            f"parts for tensor parallelism over {degree} ranks"
        )
    return full.unflatten(dim, (layout.chunks, degree, -1)).select(dim + 1, rank).flatten(dim, dim + 1)


def joined(parts: Tensor, layout: Layout, degree: int) -> Tensor:
    """The full tensor, given every rank's `cut` of it side by side along the layout's dim."""
    if layout.chunks == 1:
        return parts
    dim = _dim(layout)
    return parts.unflatten(dim, (degree, layout.chunks, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _dim(layout: Layout) -> int:
    assert layout.dim is not None, f"{layout} has no dim"
    return layout.dim


def stored_layouts(unit: Unit, layout: TensorParallelLayout | None) -> dict[str, Layout]:
    """How the tensor axis stores the parameters of `unit`, by their names in the model."""
    stored = {} if layout is None else layout.parameter_layouts
    return {absolute_name(unit.modules, name): each for name, each in stored.items()}


def distribute_parameters(
    module_named: Callable[[str], nn.Module], layout: TensorParallelLayout, mesh: DeviceMesh, ties: Ties
) -> None:
    """Makes the parameters that `layout` mentions DTensors on the 1-D tensor `mesh`; tied ones stay tied.

    Each keeps only this rank's part. Parameters that the layout does not mention stay as they are on every rank.
    """
    for part in layout.modules:
        module = module_named(part.module)
        for name, change in part.parameters.items():
            full = module.get_parameter(name)
            if not isinstance(full, DTensor):  # else a tied one that another module has brought already
                ties.replace(module, name, _distributed(full, change.source, mesh))


def _distributed(full: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    with torch.no_grad():
        local = cut(full, layout, mesh.size(), mesh.get_local_rank()).clone(memory_format=torch.contiguous_format)
    placement = Shard(_dim(layout)) if layout.kind == "S" else Replicate()
    shared = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )
    return nn.Parameter(shared, requires_grad=full.requires_grad)


def local_parameter(module: nn.Module, name: str) -> Tensor:
    """This rank's part of a module's own parameter as stored; its gradient returns to the parameter."""
    parameter = module.get_parameter(name)
    if not isinstance(parameter, DTensor):
        return parameter
    own = _OwnGradient.apply(parameter.to_local())
    assert isinstance(own, Tensor)
    return own


class _OwnGradient(torch.autograd.Function):
    """The same tensor, whose gradient shares its storage with no other parameter's.

    Autograd copies a gradient that is in use elsewhere before a parameter keeps it, but cannot see that inside of a
    DTensor: a class token and the positions that are added to it would accumulate into one storage. That happens where
    nothing was summed up over samples: the gradient is a part of another one, or, as long as one sample, all of it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        is_part = gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size()
        is_one_sample = gradient.ndim > 1 and gradient.shape[0] == 1
        return gradient.clone(memory_format=torch.contiguous_format) if is_part or is_one_sample else gradient


# ----------------------------------------------------------------------------------------------- activations


def redistributor(mesh: DeviceMesh) -> Redistribute:
    """The function that changes a local tensor's layout on the 1-D tensor `mesh`, differentiably.

    One collective per direction at most, and only where the layout algebra of `plan.Redistribution` has one.
    """

    def redistribute(tensor: Tensor, change: Redistribution) -> Tensor:
        source, target = change.source, change.target
        if source == target:
            return tensor
        if _goes_by_replication(source, target, mesh):
            whole = redistribute(tensor, Redistribution(source=source, target=REPLICATED))
            return redistribute(whole, Redistribution(source=REPLICATED, target=target))
        if target.kind == "P":
            assert source.kind == "R", f"no rank has a summand of {source}"
            return _Summand.apply(tensor, mesh.get_local_rank() == 0)
        if source.chunks > 1:
            return joined(_move(tensor, _plain(source), target, mesh), source, mesh.size())
        return _move(_in_chunk_order(tensor, target, mesh.size()), source, _plain(target), mesh)

    return redistribute


def _goes_by_replication(source: Layout, target: Layout, mesh: DeviceMesh) -> bool:
    """Whether a change is two changes: P to R+, which all-reduces both ways, and between shards without all-to-all.

    gloo has none; DTensor would gather and cut, too, and warn.
    """
    if source.kind == target.kind == "S":
        return source.chunks > 1 or target.chunks > 1 or _lacks_all_to_all(mesh)
    return (source.kind, target.kind) == ("P", "R+")


def _lacks_all_to_all(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cpu"


def _move(tensor: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Tensor:
    """`tensor` from one plain layout to another, by DTensor."""
    if source == target:
        return tensor
    _check_even(tensor, source, target, mesh.size())
    moved = DTensor.from_local(tensor, mesh, [_placement(source)], run_check=False)
    moved = moved.redistribute(placements=[_placement(target)])
    return _Plain.apply(moved.to_local(grad_placements=[_gradient_placement(target)]))


def _placement(layout: Layout) -> Placement:
    if layout.kind == "S":
        return Shard(_dim(layout))
    return Partial() if layout.kind == "P" else Replicate()


def _gradient_placement(layout: Layout) -> Placement:
    if layout.kind == "S":
        return Shard(_dim(layout))
    return Partial() if layout.kind == "R+" else Replicate()


def _plain(layout: Layout) -> Layout:
    return layout.model_copy(update={"chunks": 1})


def _in_chunk_order(full: Tensor, target: Layout, degree: int) -> Tensor:
    """`full` with the target's dim reordered so that a plain cut gives each rank its part of every chunk."""
    if target.chunks == 1:
        return full
    dim = _dim(target)
    return full.unflatten(dim, (target.chunks, degree, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _check_even(tensor: Tensor, source: Layout, target: Layout, degree: int) -> None:
    if target.kind != "S":
        return
    length = tensor.shape[_dim(target)]
    if length % degree:
        raise RunError(
            f"tensor parallelism over {degree} ranks cuts dim {target.dim} of an activation of shape "
            f"{tuple(tensor.shape)}, whose length {length} is no multiple of {degree}; pad the inputs"
        )


class _Plain(torch.autograd.Function):
    """The same tensor, not as a view: FSDP distrusts modules that return views, and `to_local` gives one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Summand(torch.autograd.Function):
    """R to P: the value on one rank, zero on the others; every rank's gradient is the full one already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, keep: bool) -> Tensor:
        return tensor.detach() if keep else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# ----------------------------------------------------------------------------------------------- the unit as a whole


def apply_tensor_parallel(
    module_named: Callable[[str], nn.Module],
    layout: TensorParallelLayout,
    mesh: DeviceMesh,
    ties: Ties,
    regions: ShardRegions,
) -> None:
    """Makes one unit's modules compute on this rank's share, in place. `mesh` is the 1-D tensor axis."""
    distribute_parameters(module_named, layout, mesh, ties)
    localize(module_named, layout, _tracked(redistributor(mesh), regions), local_parameter)


def _tracked(redistribute: Redistribute, regions: ShardRegions) -> Redistribute:
    """`redistribute` that also notes whether ranks hold parts or the whole after it."""

    def tracked(tensor: Tensor, change: Redistribution) -> Tensor:
        if change.source != change.target:
            if change.target.kind == "R":
                regions.leave()
            elif change.target.kind != "P":
                regions.enter()
        return redistribute(tensor, change)

    return tracked


def convert_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Makes `module` take its activation in another layout than it computes in."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return with_activation(args, kwargs, change)

    module.register_forward_pre_hook(before, with_kwargs=True)


def convert_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Makes `module` give its activation in another layout than it computes in."""

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(after)


def with_activation(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a repeated block with `change` applied to what the block before it returned."""
    key = activation_argument(args, kwargs, _is_tensor, lambda value: _is_tensor(value) and value.is_floating_point())
    if key is None:
        raise RunError("a block was called without a tensor that could be the activation of the block before it")
    if key == 0:
        return (change(args[0]), *args[1:]), kwargs
    assert isinstance(key, str), "all are by keyword"
    return args, {**kwargs, key: change(kwargs[key])}


def activation_argument(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
    is_floating: Callable[[Any], bool],
) -> int | str | None:
    """Which argument of a repeated block is what the block before it returned: its position or keyword.

    That is the first positional argument; where all are by keyword, `hidden_states` or the first tensor of
    floating-point numbers. None when there is no such.
    """
    if args and is_tensor(args[0]):
        return 0
    names = sorted(kwargs, key=lambda name: name != "hidden_states")
    return next((name for name in names if is_floating(kwargs[name])), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
