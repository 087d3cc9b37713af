"""Keeps tied weights tied when their uses lie on different pipeline stages.

Each of those stages holds a copy. Copies start equal and receive equal gradients, the sum over all uses, so the
optimizer moves them alike (Megatron-LM ties its word embeddings so, arXiv 2104.04473). The ranks that sum are those at
the same place of each stage; they hold the same shard when the copies have one layout, and exchange whole gradients
otherwise. A pipeline rank may hold several of the stages, and so several copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from galv.planner.plan import Plan
from galv.runtime.data_parallel import owns
from galv.runtime.mesh import without_context
from galv.runtime.pipeline import StageModule, module_stages, stage_of
from galv.runtime.recompute import original_name
from galv.runtime.tensor_parallel import stored_layouts
from galv.schedules import rank_of_chunk


@dataclass(frozen=True, eq=False)
class _Copies:
    """This rank's copies of a tied weight."""

    parameters: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]
    """All pipeline ranks that hold copies, this one among them; the one with the first stage comes first."""
    alike: bool
    """Whether all of them hold it in one layout."""


class TiedCopies:
    """The weights of one rank's stages that other stages hold copies of. Every rank of `group` must make it."""

    def __init__(self, stages: Sequence[StageModule], plan: Plan, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        owners = module_stages(plan)
        self._copies: list[_Copies] = []
        for names in plan.model.tied:
            held = sorted({stage_of(name, owners) for name in names})
            if len(held) > 1:
                own = tuple(_own(stages, names))
                alike = _cut_alike(plan, names)
                ranks = [rank_of_chunk(plan.pipeline.schedule, plan.pipeline.degree, stage) for stage in held]
                if own:
                    self._copies.append(_Copies(own, tuple(dict.fromkeys(ranks)), alike))

    def equalize(self) -> None:
        """Gives all copies the value of the first stage's."""
        with torch.no_grad():
            for copies in self._copies:
                first = self._exchanged(copies, self._given(copies, copies.parameters[0]))[0]
                for parameter in copies.parameters:
                    _local(parameter).copy_(_in_layout(first, copies.alike, parameter))

    def detach_gradients(self) -> list[Tensor | None]:
        """The gradients accumulated before, which are sums already; leaves none."""
        before = [parameter.grad for copies in self._copies for parameter in copies.parameters]
        for copies in self._copies:
            for parameter in copies.parameters:
                parameter.grad = None
        return before

    def sum_gradients(self, before: list[Tensor | None]) -> None:
        """Makes each copy's gradient the sum over the copies, plus what `detach_gradients` took away."""
        earlier = iter(before)
        for copies in self._copies:
            for parameter in copies.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            own = [self._given(copies, parameter.grad) for parameter in copies.parameters if parameter.grad is not None]
            total = torch.stack(self._exchanged(copies, _sum(own))).sum(dim=0)
            for parameter in copies.parameters:
                assert parameter.grad is not None
                _local(parameter.grad).copy_(_in_layout(total, copies.alike, parameter))
                if (more := next(earlier)) is not None:
                    parameter.grad.add_(more)

    def _given(self, copies: _Copies, tensor: Tensor) -> Tensor:
        """What is exchanged of a copy's `tensor`: the local shard when all are alike, the whole tensor otherwise."""
        return (
            _local(tensor) if copies.alike or not isinstance(tensor, DTensor) else tensor.full_tensor()
        ).contiguous()

    def _exchanged(self, copies: _Copies, own: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of `copies.ranks`."""
        found = {rank: own if rank == self._rank else torch.empty_like(own) for rank in copies.ranks}
        operations = []
        for rank in copies.ranks:
            if rank != self._rank:
                peer = dist.get_global_rank(self._group, rank)
                operations.append(dist.P2POp(dist.isend, own, peer, self._group))
                operations.append(dist.P2POp(dist.irecv, found[rank], peer, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return list(found.values())


def _cut_alike(plan: Plan, names: Iterable[str]) -> bool:
    """Whether the ranks at the same place of each stage hold the same part of the tied weight `names`."""
    parts = set()
    for unit in plan.units():
        if any(owns(unit, name) for name in names):
            stored, mesh = stored_layouts(unit, plan.layout_of(unit)), without_context(unit.strategy)
            cut = next((stored[name] for name in names if name in stored), None)
            parts.add((mesh.tp, mesh.dp_shard, mesh.dp_replicate, cut))
    return len(parts) == 1


def _own(stages: Sequence[StageModule], names: Iterable[str]) -> Iterable[nn.Parameter]:
    """One parameter for each of `stages` that holds one of the tied `names`."""
    for stage in stages:
        parameters = {original_name(n): p for n, p in stage.named_parameters(remove_duplicate=False)}
        found = next((parameters[name] for name in names if name in parameters), None)
        if found is not None:
            yield found


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors)).sum(dim=0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_layout(tensor: Tensor, is_shard: bool, parameter: nn.Parameter) -> Tensor:
    """What this rank holds of `tensor` in the layout of `parameter`."""
    if is_shard or not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
