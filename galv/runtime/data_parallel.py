"""How units share their parameters and reduce their gradients over the data axes: ZeRO 0 to 3, unit by unit.

Everything is FSDP2's `fully_shard` over a unit's data axes, dp_replicate and dp_shard; levels differ in what is done
when (ZeRO, arXiv 1910.02054):

    zero 3   parameters freed after forward and backward; gradients reduce-scattered every microbatch
    zero 2   parameters gathered once a step; gradients reduce-scattered every microbatch
    zero 1   parameters gathered once a step; gradients reduce-scattered at the last microbatch only
    zero 0   the same with dp_shard 1: gradients all-reduced at the last microbatch only

Replicas of shards (dp_replicate > 1 with zero 1 to 3) are all-reduced at the last microbatch only. `fully_shard` over a
shard axis of length 1 does what torch's composable `replicate` does, at the same cost, so one mechanism serves all.
Where nothing is sharded and nothing is cast (every unit zero 0, tp 1, fp32, no pipeline) DistributedDataParallel takes
its place (`replicas`), which needs no second copy of parameters and gradients.

Gradients are averaged over the data-parallel groups, as users of DDP expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from galv.planner.plan import Plan, Precision, Strategy, Unit
from galv.runtime.replicas import Replicas

COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Group:
    """Units of this rank that share one FSDP group: one, or those tied to one another."""

    units: tuple[Unit, ...]

    @property
    def zero(self) -> int:
        """The level of the group: tied units take the highest among them, since their tensor is gathered once."""
        return max(unit.strategy.zero for unit in self.units)

    @property
    def unit(self) -> Unit:
        """The unit whose mesh and level the group has."""
        return max(self.units, key=lambda unit: unit.strategy.zero)


def grouped(units: Sequence[Unit], tied: Iterable[Sequence[str]]) -> list[Group]:
    """The units in groups, tied units together, each group where its first unit stands; outer modules last.

    `tied` are the groups of parameter names that are one tensor.
    """
    groups: list[tuple[Unit, ...]] = [(unit,) for unit in units]
    for names in tied:
        together = [group for group in groups if any(owns(unit, name) for unit in group for name in names)]
        if len(together) > 1:
            merged = tuple(unit for group in together for unit in group)
            groups[groups.index(together[0])] = merged
            groups = [group for group in groups if group not in together]
    return [Group(group) for group in sorted(groups, key=_depth, reverse=True)]


def owns(unit: Unit, name: str) -> bool:
    """Whether the parameter or module `name` lies within `unit`."""
    return any(not module or name == module or name.startswith(f"{module}.") for module in unit.modules)


def _depth(group: tuple[Unit, ...]) -> int:
    """0 for a group that owns the root, 1 for all others: sorting is stable."""
    return min(1 if module else 0 for unit in group for module in unit.modules)


def uses_ddp(plan: Plan) -> bool:
    """Whether DistributedDataParallel runs this plan."""
    strategies = [unit.strategy for unit in plan.units()]
    plain = all(
        own.zero == 0 and own.tp == own.cp == own.ep == 1 and not _keeps_masters_away(own) for own in strategies
    )
    return plain and plan.pipeline.degree == 1 and plan.training.precision == "fp32" and plan.data_parallel_degree > 1


def uses_fsdp(plan: Plan, unit: Unit) -> bool:
    """Whether `fully_shard` runs `unit`; where neither it nor DDP does, there is nothing to reduce, cast or offload."""
    own = unit.strategy
    needed = own.dp * own.cp > 1 or plan.training.precision != "fp32" or _keeps_masters_away(own)
    return needed and not uses_ddp(plan)


def uses_traced_forward(plan: Plan) -> bool:
    """Whether the forward that runs is the traced one, not the model's own.

    So with a pipeline, which cuts it into stages, and where units have different data-parallel degrees: what lies
    between their modules is then computed for other samples, too.
    """
    return plan.pipeline.degree > 1 or len(plan.data_degrees) > 1


def _keeps_masters_away(strategy: Strategy) -> bool:
    """Whether masters lie on the host, where FSDP keeps them."""
    return "optimizer" in strategy.offload


def shard(
    modules: Sequence[nn.Module], mesh: DeviceMesh, zero: int, precision: Precision, offload: OffloadPolicy
) -> FSDPModule:
    """One FSDP group of `modules`, in place, over their `Meshes.data`. Apply to inner modules first."""
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=torch.float32)
    target: Any = list(modules) if len(modules) > 1 else modules[0]
    fully_shard(target, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, offload_policy=offload)
    group = modules[0]
    assert isinstance(group, FSDPModule), "fully_shard makes its modules FSDP modules"
    # gloo knows only sums, and NCCL sums without copies; the division is of the reduced shard.
    group.set_force_sum_reduction_for_comms(True)
    return group


class GradientSync:
    """Says to every unit what to do with its gradients in the microbatch to come."""

    def __init__(self) -> None:
        self._groups: list[tuple[FSDPModule, int]] = []
        self._replicas: Replicas | None = None

    def add(self, group: FSDPModule, zero: int) -> None:
        """Takes charge of an FSDP group of that level."""
        self._groups.append((group, zero))

    def add_replicas(self, replicas: Replicas) -> None:
        """Takes charge of a replicated model."""
        self._replicas = replicas

    def prepare(self, *, last: bool, whole: bool = True) -> None:
        """Sets what the next forward and backward do; `last` when no other microbatch follows in this step.

        With a pipeline, whose forwards run ahead, before each backward. `whole` is False where that is the first part
        of a split backward: nothing is reduced then.
        """
        if self._replicas is not None:
            self._replicas.reduces = last
        for group, zero in self._groups:
            group.set_requires_gradient_sync(whole and (last or zero >= 2), recurse=False)
            group.set_requires_all_reduce(last, recurse=False)
            group.set_reshard_after_backward(last or zero == 3, recurse=False)

    def finish(self, stage: nn.Module, *, last: bool) -> None:
        """Has the units of `stage` do with gradients that came after a split backward what they do after a whole one.

        Twice, as FSDP2 reduces a unit's gradients together and those of the two parts may have come in two dtypes: at
        first they are accumulated, in one.
        """
        if isinstance(stage, FSDPModule):
            _end_backward(stage)
            self.prepare(last=last)
            _end_backward(stage)


def _end_backward(root: FSDPModule) -> None:
    """What FSDP2 does at the end of a backward; torch's pipeline schedules call the same, for want of a public way."""
    root._get_fsdp_state()._root_post_backward_final_callback()
