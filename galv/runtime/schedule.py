"""Drives one pipeline rank through a step: what is received, computed, sent and kept, in the order of the schedule.

The order is `galv.schedules.orders_of` the plan's pipeline, operation by operation. A rank holds one chunk of the model
or several; chunks on one rank hand each other their tensors. A chunk keeps a received tensor only as long as its
microbatch is in flight, lets values without gradient cross, and leaves to the caller when gradients are reduced: ZeRO
levels differ in that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.runtime.loss import weighted
from galv.runtime.pipeline import StageModule
from galv.runtime.step_profile import busy
from galv.runtime.tied_stages import TiedCopies
from galv.runtime.transfers import Directions, Transfers, taker_of, warm_up
from galv.runtime.weight_gradients import Products
from galv.schedules import Operation, orders_of, rank_of_chunk

Told = Callable[[Operation, bool], None]
"""Called with an operation and whether it is the last of its chunk in this step that makes weight gradients."""


class PipelineRunner:
    """Runs the training steps of one rank's chunks together with the other pipeline ranks, which are `group`.

    `step` returns when the gradients of all microbatches have been accumulated. `before` is told of each operation
    ahead of it, and may choose whether gradients are reduced at once; `after` is told of those that made gradients
    outside of a backward, which nothing has reduced.

    Made when the chunks, which are in the order of the model, have their weights in their final layout; tied weights on
    other chunks are made equal then. `directions` are the groups that messages take, by default `group`, see
    `transfers.directions`.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        before: Told = lambda operation, last: None,
        after: Told = lambda operation, last: None,
        directions: Directions | None = None,
    ) -> None:
        self._group, self._device, self._before, self._after = group, device, before, after
        self._num_microbatches = plan.training.num_microbatches
        self._batch_dims = {spec.name: spec.batch_dim for spec in plan.model.inputs}
        self._orders, rank = orders_of(plan.pipeline, self._num_microbatches), dist.get_rank(group)
        self._run = self._orders.ranks[rank]
        self._last = _last_of_chunks(self._run)
        self._chunks = {stage.stage_index: _Chunk(stage) for stage in stages}
        self._loss_rank = rank_of_chunk(plan.pipeline.schedule, plan.pipeline.degree, len(plan.stages) - 1)
        groups = directions or (group, group)
        self._transfers = Transfers(self._orders, rank, groups, self._empty_tensors)
        self._handed: dict[Operation, Sequence[Tensor]] = {}
        """What the rank's own chunks have made for each other, by the operation that takes it."""
        self._ties = TiedCopies(stages, plan, group)
        # Collectives and messages would otherwise open connections in whatever order ranks come to them.
        dist.all_reduce(torch.zeros((), device=device), group=group)
        warm_up(self._orders, rank, groups, device)
        self._ties.equalize()

    def step(self, batch: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """The sum over microbatches of loss times weight, the same on every rank; gradients are accumulated.

        `batch` has this data-parallel group's samples for all microbatches, which are cut from it in order; every
        rank is given the same. `weights` is float32 (num_microbatches,), see `loss.microbatch_weights`. Raises
        UsageError, on every rank, for inputs that the batch lacks, or sizes that do not divide.
        """
        # All inputs on all ranks: a rank that went on alone would wait for the others.
        parts = {name: self._parts(batch, name) for name in self._batch_dims}
        gradients_before = self._ties.detach_gradients()
        self._transfers.begin()
        total = torch.zeros((), device=self._device)
        for operation, following in zip(self._run, (*self._run[1:], None), strict=True):
            loss = self._execute(operation, following, parts, weights)
            total += 0.0 if loss is None else loss
        self._transfers.finish()
        self._ties.sum_gradients(gradients_before)
        dist.broadcast(total, group=self._group, group_src=self._loss_rank)
        return total

    def _execute(
        self,
        operation: Operation,
        following: Operation | None,
        parts: Mapping[str, Sequence[Tensor]],
        weights: Tensor,
    ) -> Tensor | None:
        """Runs an operation and passes on what it makes; the loss, detached, where it makes one."""
        kind, index, i = operation
        chunk, taken = self._chunks[index], self._taken(operation)
        if following is not None:
            self._transfers.expect(following)
        self._before(operation, operation in self._last)
        loss = None
        with busy(kind):
            if kind == "forward":
                inputs = {name: parts[name][i] for name in chunk.stage.input_names}
                made, loss = chunk.forward(i, taken, inputs, weights[i])
            elif kind == "weight":
                made = chunk.weight(i)
                self._after(operation, operation in self._last)
            else:
                made = chunk.backward(i, taken, split=kind == "input")
        taker = taker_of(operation, self._orders)
        if taker is not None and taker.chunk in self._chunks:
            self._handed[taker] = made
        elif taker is not None:
            self._transfers.send(taker, made)
        return loss

    def _taken(self, operation: Operation) -> Sequence[Tensor]:
        if operation in self._handed:
            return self._handed.pop(operation)
        return () if self._transfers.source(operation) is None else self._transfers.receive(operation)

    def _empty_tensors(self, operation: Operation) -> list[Tensor]:
        """Room for what an operation on another rank sends here."""
        if operation.kind == "forward":
            crossings = self._chunks[operation.chunk + 1].stage.crossings_in
        else:
            crossings = tuple(c for c in self._chunks[operation.chunk - 1].stage.crossings_out if c.needs_grad)
        return [torch.empty(c.meta.shape, dtype=c.meta.dtype, device=self._device) for c in crossings]

    def _parts(self, batch: Mapping[str, Tensor], name: str) -> Sequence[Tensor]:
        """An input of each microbatch."""
        if name not in batch:
            raise UsageError(f"the batch has no {name!r}, which the model was planned with; it has {', '.join(batch)}")
        dim, count = self._batch_dims[name], self._num_microbatches
        if dim is None:
            return (batch[name],) * count
        if batch[name].shape[dim] % count:
            raise UsageError(
                f"{batch[name].shape[dim]} samples of {name!r} cannot be cut into {count} equal microbatches"
            )
        return batch[name].chunk(count, dim)


def _last_of_chunks(run: Sequence[Operation]) -> frozenset[Operation]:
    """The last operation of each chunk that makes weight gradients."""
    return frozenset({op.chunk: op for op in run if op.kind in ("backward", "weight")}.values())


# ----------------------------------------------------------------------------------------------- a chunk


@dataclass(frozen=True, eq=False)
class _InFlight:
    """What a chunk keeps of a microbatch whose backward is to come. The outputs themselves need not be kept."""

    received: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    """Where backward starts."""
    loss: Tensor | None
    """On the last chunk."""


class _Chunk:
    """A stage and its microbatches in flight."""

    def __init__(self, stage: StageModule) -> None:
        self.stage = stage
        self._in_flight: dict[int, _InFlight] = {}
        self._products: dict[int, Products] = {}

    def forward(
        self, i: int, received: Sequence[Tensor], inputs: Mapping[str, Any], weight: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """(What microbatch `i` sends on, its loss times weight where this is the last chunk), both detached."""
        received = tuple(tensor.detach() for tensor in received)
        for crossing, tensor in zip(self.stage.crossings_in, received, strict=True):
            tensor.requires_grad_(crossing.needs_grad)
        output = self.stage(*received, **inputs)
        if self.stage.is_last:
            loss = weighted(output, weight)
            self._in_flight[i] = _InFlight(received, (), loss)
            return (), loss.detach()
        pairs = zip(output, self.stage.crossings_out, strict=True)
        edges = tuple(get_gradient_edge(tensor) for tensor, crossing in pairs if crossing.needs_grad)
        self._in_flight[i] = _InFlight(received, edges, None)
        return tuple(tensor.detach().contiguous() for tensor in output), None

    def backward(self, i: int, gradients: Sequence[Tensor], *, split: bool) -> tuple[Tensor, ...]:
        """The gradients of what microbatch `i` received; those of weights are accumulated, or put off in part."""
        flight = self._in_flight.pop(i)
        if flight.loss is not None:
            flight.loss.backward()
        elif flight.edges:
            torch.autograd.backward(flight.edges, tuple(gradients))
        if split:
            self._products[i] = self.stage.weight_gradients.take()
        return tuple(_gradient(tensor) for tensor in flight.received if tensor.requires_grad)

    def weight(self, i: int) -> tuple[()]:
        """Nothing; accumulates the weight gradients of microbatch `i` that were put off."""
        self._products.pop(i).make()
        return ()


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
