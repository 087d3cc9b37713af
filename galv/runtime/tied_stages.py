"""Keeps tied weights tied when their uses lie on different pipeline stages.

Each of those stages holds a copy. Copies start equal and receive equal gradients, the sum over all uses, so the
optimizer moves them alike (Megatron-LM ties its word embeddings so, arXiv 2104.04473). The ranks that sum are those at
the same place of each stage; they hold the same shard when the copies have one layout, and exchange whole gradients
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from galv.planner.plan import Plan
from galv.runtime.pipeline import StageModule, module_stages, stage_of
from galv.runtime.recompute import original_name


@dataclass(frozen=True, eq=False)
class _Copy:
    """This stage's copy of a tied weight."""

    parameter: nn.Parameter
    stages: tuple[int, ...]
    """All stages that hold a copy, this one among them, in order."""
    alike: bool
    """Whether all of them hold it in one layout."""


class TiedCopies:
    """The weights of one stage that other stages hold copies of. Every rank of `group` must make it."""

    def __init__(self, stage: StageModule, plan: Plan, group: dist.ProcessGroup) -> None:
        self._group, self._stage_index = group, stage.stage_index
        parameters = {original_name(n): p for n, p in stage.named_parameters(remove_duplicate=False)}
        owners = module_stages(plan)
        self._copies: list[_Copy] = []
        for names in plan.model.tied:
            stages = tuple(sorted({stage_of(name, owners) for name in names}))
            if len(stages) > 1:
                own = next((parameters[n] for n in names if stage_of(n, owners) == stage.stage_index), None)
                alike = self._layouts_are_equal(own)
                if own is not None:
                    self._copies.append(_Copy(own, stages, alike))

    def equalize(self) -> None:
        """Gives all copies the value of the first stage's."""
        with torch.no_grad():
            for copy in self._copies:
                first = self._exchanged(copy, copy.parameter)[0]
                _local(copy.parameter).copy_(_in_layout(first, copy))

    def detach_gradients(self) -> list[Tensor | None]:
        """The gradients accumulated before, which are sums already; leaves none."""
        before = [copy.parameter.grad for copy in self._copies]
        for copy in self._copies:
            copy.parameter.grad = None
        return before

    def sum_gradients(self, before: list[Tensor | None]) -> None:
        """Makes each copy's gradient the sum over the copies, plus what `detach_gradients` took away."""
        for copy, earlier in zip(self._copies, before, strict=True):
            if copy.parameter.grad is None:
                copy.parameter.grad = torch.zeros_like(copy.parameter)
            gradient = copy.parameter.grad
            total = torch.stack(self._exchanged(copy, gradient)).sum(dim=0)
            _local(gradient).copy_(_in_layout(total, copy))
            if earlier is not None:
                gradient.add_(earlier)

    def _exchanged(self, copy: _Copy, tensor: Tensor) -> list[Tensor]:
        """Every stage's tensor, in the order of stages: local shards when alike, whole tensors otherwise."""
        own = (_local(tensor) if copy.alike or not isinstance(tensor, DTensor) else tensor.full_tensor()).contiguous()
        found = {stage: own if stage == self._stage_index else torch.empty_like(own) for stage in copy.stages}
        operations = []
        for stage in copy.stages:
            if stage != self._stage_index:
                peer = dist.get_global_rank(self._group, stage)
                operations.append(dist.P2POp(dist.isend, own, peer, self._group))
                operations.append(dist.P2POp(dist.irecv, found[stage], peer, self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return list(found.values())

    def _layouts_are_equal(self, own: nn.Parameter | None) -> bool:
        answers: list[object] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(answers, None if own is None else _layout(own), group=self._group)
        return len({repr(answer) for answer in answers if answer is not None}) == 1


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(parameter: Tensor) -> tuple[object, ...]:
    if isinstance(parameter, DTensor):
        return (tuple(parameter.to_local().shape), str(parameter.placements), tuple(parameter.device_mesh.shape))
    return (tuple(parameter.shape),)


def _in_layout(tensor: Tensor, copy: _Copy) -> Tensor:
    """What this rank holds of `tensor`, a shard already when the copies are alike."""
    if copy.alike or not isinstance(copy.parameter, DTensor):
        return tensor
    mesh, placements = copy.parameter.device_mesh, copy.parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
