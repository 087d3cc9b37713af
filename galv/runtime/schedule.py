"""Drives one stage through a pipeline schedule: what is received, computed, sent and kept, and in which order.

The order is torch.distributed.pipelining's: `ScheduleGPipe` (Huang et al., arXiv 1811.06965) or `Schedule1F1B`
(Narayanan et al., arXiv 2104.04473). The stage is a `PipelineStage` that knows its shapes beforehand, keeps a
received tensor only as long as its microbatch is in flight, lets values without gradient cross, and leaves to the
caller when gradients are reduced: ZeRO levels differ in that, and torch's own stage would always wait for the last
microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.runtime.loss import weighted
from galv.runtime.pipeline import StageModule
from galv.runtime.tied_stages import TiedCopies

BeforeBackward = Callable[[bool], None]
"""Called ahead of each microbatch's backward with whether it is the step's last."""


class PipelineRunner:
    """Runs the training steps of one stage together with the ranks of the other stages in `group`.

    `step` returns when the gradients of all microbatches have been accumulated; `before_backward` may choose for each
    microbatch whether its gradients are reduced at once. Made when the stage has its weights in their final layout;
    tied weights on other stages are made equal then.
    """

    def __init__(
        self,
        stage: StageModule,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        before_backward: BeforeBackward = lambda last: None,
    ) -> None:
        self._stage, self._group, self._device = stage, group, device
        self._num_microbatches = plan.training.num_microbatches
        self._batch_dims = {spec.name: spec.batch_dim for spec in plan.model.inputs}
        self._schedule = _schedule(_Stage(stage, device, group, before_backward), plan, self._chunks())
        self._ties = TiedCopies(stage, plan, group)
        # Point-to-point calls would otherwise be the first use of the communicator, which all its ranks must join.
        dist.all_reduce(torch.zeros((), device=device), group=group)
        self._ties.equalize()

    def step(self, batch: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """The sum over microbatches of loss times weight, the same on every stage; gradients are accumulated.

        `batch` has this data-parallel group's samples for all microbatches, which are cut from it in order; every
        stage is given the same. `weights` is float32 (num_microbatches,), see `loss.microbatch_weights`. Raises
        UsageError, on every stage, for inputs that the batch lacks, or sizes that do not divide.
        """
        # All inputs on all stages: a stage that went on alone would wait for the others.
        checked = {name: self._checked(batch, name) for name in self._batch_dims}
        inputs: dict[str, Any] = {name: checked[name] for name in self._stage.input_names}
        gradients_before = self._ties.detach_gradients()
        losses: list[Tensor] = []
        target = weights if self._stage.is_last else None
        self._schedule.step(target=target, losses=losses, return_outputs=False, **inputs)
        self._ties.sum_gradients(gradients_before)
        return self._known_everywhere(losses)

    def _known_everywhere(self, losses: list[Tensor]) -> Tensor:
        """The sum of the last stage's losses."""
        total = torch.zeros((), device=self._device)
        for loss in losses:
            total += loss.detach()
        dist.broadcast(total, group=self._group, group_src=self._stage.num_stages - 1)
        return total

    def _checked(self, batch: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in batch:
            raise UsageError(f"the batch has no {name!r}, which the model was planned with; it has {', '.join(batch)}")
        dim = self._batch_dims[name]
        if dim is not None and batch[name].shape[dim] % self._num_microbatches:
            raise UsageError(
                f"{batch[name].shape[dim]} samples of {name!r} cannot be cut into {self._num_microbatches} equal "
                "microbatches"
            )
        return batch[name]

    def _chunks(self) -> dict[str, Any]:
        dims = {name: self._batch_dims[name] for name in self._stage.input_names}
        return {name: _Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in dims.items()}


def _schedule(stage: _Stage, plan: Plan, chunks: dict[str, Any]) -> PipelineScheduleSingle:
    """The plan's schedule; with fewer microbatches than stages 1F1B never comes to alternate and is GPipe."""
    count = plan.training.num_microbatches
    alternating = plan.pipeline.schedule == "1f1b" and count >= stage.num_stages
    kind = Schedule1F1B if alternating else ScheduleGPipe
    return kind(stage, count, loss_fn=_weighted_loss, kwargs_chunk_spec=chunks or None, scale_grads=False)


def _weighted_loss(loss: Tensor, weight: Tensor) -> Tensor:
    return weighted(loss, weight.squeeze(0))


# ----------------------------------------------------------------------------------------------- the stage to torch


class _Stage(PipelineStage):
    """The stage as torch's schedules drive it. Chunk ids count microbatches."""

    def __init__(
        self, stage: StageModule, device: torch.device, group: dist.ProcessGroup, before_backward: BeforeBackward
    ) -> None:
        super().__init__(stage, stage.stage_index, stage.num_stages, device, group=group)
        self._module, self._before_backward = stage, before_backward
        self._forward_received: dict[int, tuple[Tensor, ...]] = {}
        self._backward_received: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        """Until they are sent."""
        self._in_flight: dict[int, tuple[tuple[Tensor, ...], tuple[GradientEdge, ...]]] = {}
        """What microbatches that wait for their backward received, and where backward starts: the outputs themselves
        need not be kept."""
        self._input_gradients: dict[int, tuple[Tensor, ...]] = {}

    # -- communication

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of what the stage before sends for a microbatch."""
        self._forward_received[fwd_chunk_id] = tuple(self._empty(c.meta) for c in self._module.crossings_in)
        return self._operations(dist.irecv, self._forward_received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a microbatch's outputs."""
        sent = [output.detach().contiguous() for output in self._outputs.pop(fwd_chunk_id)]
        return self._operations(dist.isend, sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradients of a microbatch's outputs."""
        received = tuple(self._empty(c.meta) for c in self._module.crossings_out if c.needs_grad)
        self._backward_received[bwd_chunk_id] = received
        return self._operations(dist.irecv, received, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradients of what a microbatch received."""
        return self._operations(dist.isend, self._input_gradients.pop(bwd_chunk_id), self.stage_index - 1)

    def _operations(self, kind: Any, tensors: Any, stage: int) -> list[dist.P2POp]:
        if not tensors:
            return []
        peer = dist.get_global_rank(self.group, stage)  # type: ignore[arg-type]  # never None here
        return [dist.P2POp(kind, tensor, peer, self.group) for tensor in tensors]

    def _empty(self, meta: Tensor) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    # -- computation

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """What the stage computes for a microbatch, from what it received and from the model's inputs."""
        received = self._forward_received.pop(fwd_chunk_id)
        for crossing, tensor in zip(self._module.crossings_in, received, strict=True):
            tensor.requires_grad_(crossing.needs_grad)
        output = self._module(*received, **(kwargs or {}))
        self._outputs[fwd_chunk_id] = () if self.is_last else output
        pairs = zip(self._outputs[fwd_chunk_id], self._module.crossings_out, strict=True)
        edges = tuple(get_gradient_edge(tensor) for tensor, crossing in pairs if crossing.needs_grad)
        self._in_flight[fwd_chunk_id] = (received, edges)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Accumulates a microbatch's gradients."""
        received, edges = self._in_flight.pop(bwd_chunk_id)
        gradients = self._backward_received.pop(bwd_chunk_id)
        self._before_backward(last_backward)
        if self.is_last:
            loss.backward()
        elif edges:
            torch.autograd.backward(edges, gradients)
        wanted = [tensor for tensor in received if tensor.requires_grad]
        self._input_gradients[bwd_chunk_id] = tuple(_gradient(tensor) for tensor in wanted)

    # -- preparations of torch's that this stage has no need of

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches

    def _post_metadata_inference_cleanup(self) -> None:
        return

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: backward itself has reduced the gradients."""


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
