"""Experts shared out over neighbouring data-parallel ranks, with tokens exchanged between them.

Each of `ep` ranks holds 1/ep of the experts of a block, as DTensors cut along the first dim, and computes them for the
tokens of all (`galv.experts`). Around that, the parts are ordinary data parallel over the dp/ep groups of ranks that
hold the same experts, with the unit's own ZeRO level. Nothing is dropped and no capacity is set, so that training is
that of one device; how long a step takes depends on how evenly the router spreads tokens.

An expert's gradient on a rank is of the losses of all `ep` ranks. Summed over the replicas it is the sum over all
data-parallel ranks, of which the mean over replicas is divided by `ep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from galv.experts import exchange_tokens, set_counts
from galv.planner.plan import ExpertLayout, ExpertsModule, Precision
from galv.runtime.data_parallel import COMPUTE_DTYPES
from galv.runtime.tensor_parallel import local_parameter
from galv.runtime.ties import Ties

# ----------------------------------------------------------------------------------------------- tokens


class Exchange:
    """The route of one call's rows between the ranks of `group`, see `experts.Route`. Every rank must make it.

    `rows_each` are the (experts,) int64 numbers of rows that this rank has for each expert of all.
    """

    def __init__(self, rows_each: Tensor, group: dist.ProcessGroup) -> None:
        degree = dist.get_world_size(group)
        arriving = torch.empty_like(rows_each)
        dist.all_to_all_single(arriving, rows_each, group=group)
        by_rank = torch.stack((rows_each, arriving)).unflatten(1, (degree, -1)).sum(2)
        self._sent, self._received = by_rank.tolist()
        self._group = group
        total = sum(self._received)
        self._is_idle = total == 0
        own = torch.arange(len(rows_each) // degree, device=rows_each.device).repeat(degree)
        self.experts = own[:1] if self._is_idle else own.repeat_interleave(arriving, output_size=total)

    def there(self, rows: Tensor) -> Tensor:
        """The rows for this rank's experts; one of zeros where there are none, so that all take part in backward."""
        received = _exchanged(rows, self._sent, self._received, self._group)
        return torch.cat((received, received.new_zeros((1, *received.shape[1:])))) if self._is_idle else received

    def back(self, rows: Tensor) -> Tensor:
        """What the other ranks made of this rank's rows."""
        return _exchanged(rows[:0] if self._is_idle else rows, self._received, self._sent, self._group)


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    exchanged = _Exchanged.apply(rows, sent, received, group)
    assert isinstance(exchanged, Tensor)
    return exchanged


class _Exchanged(torch.autograd.Function):
    """All-to-all of rows; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


# ----------------------------------------------------------------------------------------------- experts


def apply_expert_parallel(
    module_named: Callable[[str], nn.Module], layout: ExpertLayout, mesh: DeviceMesh, ties: Ties
) -> list[nn.Module]:
    """The experts modules of one unit, which now hold this rank's experts, in place. `mesh` is `Meshes.experts`."""
    group, degree = mesh.get_group("ep"), mesh["ep"].size()
    modules = []
    for part in layout.modules:
        module = module_named(part.module)
        for owner, name in _places(module, part):
            ties.replace(owner, name, _distributed(owner.get_parameter(name), mesh))
        _compute_locally(module, part)
        set_counts(module, part, layout.num_experts // degree)
        exchange_tokens(module, part, layout.num_experts, lambda rows_each, _: Exchange(rows_each, group))
        modules.append(module)
    return modules


def _compute_locally(module: nn.Module, part: ExpertsModule) -> None:
    """Makes `module` compute with this rank's plain tensors, where the tensor axis does not see to that already."""
    compute = module.forward
    places = list(_places(module, part))

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = [(owner, name) for owner, name in places if name not in owner.__dict__]
        for owner, name in hidden:
            # An instance attribute hides the registered parameter for the length of this forward.
            owner.__dict__[name] = local_parameter(owner, name)
        try:
            return compute(*args, **kwargs)
        finally:
            for owner, name in hidden:
                del owner.__dict__[name]

    module.forward = forward


def _places(module: nn.Module, part: ExpertsModule) -> Iterator[tuple[nn.Module, str]]:
    for name in part.parameters:
        owner, _, own = name.rpartition(".")
        yield module.get_submodule(owner), own


def _distributed(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's experts of `whole`, which may be cut along the tensor axis already."""
    axis, local = mesh["ep"], whole.detach()
    placements: list[Placement] = [Shard(0)]
    if isinstance(local, DTensor):
        placements += local.placements
        axis, local = mesh["ep", "tp"], local.to_local()
    degree = mesh["ep"].size()
    with torch.no_grad():
        part = local.chunk(degree)[mesh["ep"].get_local_rank()].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    shared = DTensor.from_local(part, axis, placements, run_check=False, shape=whole.shape, stride=stride)
    return nn.Parameter(shared, requires_grad=whole.requires_grad)


def shard_experts(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    precision: Precision,
    degree: int,
    offload: OffloadPolicy,
) -> FSDPModule:
    """One FSDP group of experts modules, in place, over the `Meshes.expert_data` that hold the same experts.

    Apply before the unit around them is sharded; `degree` ranks share the experts.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision != "fp32":
        # Inputs stay as the block has cast them: a router's weights may be meant to be of single precision.
        dtype = COMPUTE_DTYPES[precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    size = mesh.size(-1)
    target: Any = list(modules) if len(modules) > 1 else modules[0]
    fully_shard(
        target,
        mesh=mesh,
        reshard_after_forward=zero == 3,
        mp_policy=policy,
        offload_policy=offload,
        shard_placement_fn=lambda parameter: Shard(_dim_to_shard(parameter, size)),
    )
    group = modules[0]
    assert isinstance(group, FSDPModule), "fully_shard makes its modules FSDP modules"
    group.set_force_sum_reduction_for_comms(True)
    group.set_all_reduce_hook(lambda reduced: _divide(reduced, degree))
    return group


def _divide(gradients: Tensor, degree: int) -> None:
    gradients.div_(degree)


def _dim_to_shard(parameter: nn.Parameter, size: int) -> int:
    """The first dim that `size` ranks can share evenly: few experts are cut along another dim than the first."""
    local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    return next((dim for dim, length in enumerate(local) if length % size == 0), 0)
