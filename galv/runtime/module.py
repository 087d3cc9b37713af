"""The parallel model that a training loop sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from galv.errors import UsageError
from galv.planner.plan import Layout, Plan
from galv.runtime.data_parallel import GradientSync
from galv.runtime.full_state import full_tensors, own_state
from galv.runtime.gradients import clip_gradients, total_norm
from galv.runtime.loss import Targets, is_integer, loss_of, weighted
from galv.runtime.loss_scale import LossScale
from galv.runtime.mesh import Meshes
from galv.runtime.optimizer import OptimizerFactory, build_optimizer
from galv.runtime.pipeline import StageModule
from galv.runtime.randomness import Streams
from galv.runtime.recompute import original_name
from galv.runtime.schedule import PipelineRunner
from galv.runtime.step_profile import busy


@dataclass(eq=False)
class Parts:
    """What `parallelize` has made of the model, besides the model."""

    plan: Plan
    meshes: Meshes
    device: torch.device
    sync: GradientSync
    layouts: dict[str, Layout]
    """By original name, how parameters are cut along the tensor axis."""
    copies: frozenset[str]
    """Parameters that are copies of one on an earlier stage."""
    targets: Targets
    called: Callable[..., Any]
    """What a forward calls: the model, or `Replicas` around it."""
    streams: Streams
    loss_scale: LossScale | None
    """Under fp16 only."""
    runner: PipelineRunner | None


class ParallelModule(nn.Module):
    """One rank's part of a model that trains under a plan. Every rank must call the same methods in the same order.

    `train_step` does a whole step's forward and backward; without a pipeline the module can also be called like the
    model it was made of, on this rank's samples, with gradients averaged over the data-parallel groups in backward.
    Where units have different data-parallel degrees, such a call takes its inputs by name and returns only the loss,
    of the samples that the last unit has on this rank.
    """

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.model = model
        """This rank's stage: the user's own modules under their own names."""
        self.plan, self.device, self._parts = parts.plan, parts.device, parts
        self._own_loss = torch.zeros((), device=parts.device)

    # -- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this rank's samples. Raises UsageError with a pipeline."""
        if self._parts.runner is not None:
            raise UsageError(
                f"a pipeline of {self.plan.pipeline.degree} stages has no forward of its own; call train_step(batch)"
            )
        if isinstance(self.model, StageModule):
            kwargs = self._inputs_of(self.model, args, kwargs)
            args = ()
        with self._parts.streams.main.active():
            output = self._parts.called(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._free_gathered()
        return output

    def _inputs_of(self, stage: StageModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in stage.input_names if name not in kwargs]
        if args or missing:
            raise UsageError(
                f"under this plan the model is called with {', '.join(stage.input_names)} by name"
                + (f"; {missing[0]} is missing" if missing else "")
            )
        return {name: kwargs[name] for name in stage.input_names}

    def train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over the global batch, a float32 scalar alike on every rank; gradients are accumulated.

        `batch` has this rank's samples, see `shard_batch`. Clip, update and zero the gradients afterwards.

        The loss that the model returns must be a mean: over its valid targets (those that are not -100) where it has
        integer targets, else over its samples. The means of microbatches and ranks are averaged in proportion to their
        targets, which gives the mean over the global batch; of sums, over samples say, it would give another number
        and too small gradients. The targets are the integer input called `labels`, `label`, `targets`, `target` or
        `lm_labels`, or the one named to `parallelize`.

        Raises UsageError when the batch is not of the plan's size or another integer input holds -100, and ModelError
        when the model returns no loss.
        """
        batch = self._on_device(batch)
        microbatches = self._microbatches(batch)
        degree, group = self._loss_degree, self._parts.meshes.data_group(self._loss_degree)
        weights = self._parts.targets.weights(self._of_loss(microbatches), group, degree)
        loss = self._scaled_step(batch, microbatches, weights)
        self._own_loss = loss.detach().clone()
        dist.all_reduce(loss, group=group)
        return loss.detach() / degree

    def ranks_without_a_loss(self) -> list[int]:
        """Ranks whose own samples gave the last step a loss that is not finite. Every rank must call it."""
        marks = torch.zeros(dist.get_world_size(), device=self.device)
        marks[dist.get_rank()] = ~torch.isfinite(self._own_loss)
        dist.all_reduce(marks)
        return [rank for rank, mark in enumerate(marks.tolist()) if mark]

    @property
    def _loss_degree(self) -> int:
        """The data-parallel degree of the unit that gives the loss."""
        return self.plan.stages[-1].units[-1].strategy.dp

    def _of_loss(self, microbatches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The microbatches with the integer inputs, among them the targets, of the samples whose loss this rank has."""
        source, target = self.plan.data_parallel_degree, self._loss_degree
        if source == target:
            return microbatches
        move, dims = self._parts.meshes.move(source, target), self._batch_dims()

        def moved(name: str, value: Any) -> Any:
            dim = dims.get(name, 0)
            return move(value, dim) if dim is not None and is_integer(value) else value

        return [{name: moved(name, value) for name, value in microbatch.items()} for microbatch in microbatches]

    def _scaled_step(self, batch: dict[str, Any], microbatches: list[dict[str, Any]], weights: Tensor) -> Tensor:
        """`_step`, with half-precision gradients kept in range."""
        scale = self._parts.loss_scale
        if scale is None:
            return self._step(batch, microbatches, weights)
        scale.check_fresh(self.parameters())
        loss = self._step(batch, microbatches, weights * scale.value) / scale.value
        scale.unscale(self.parameters())
        scale.settle(self.parameters(), self._gradient_norm())
        return loss

    def _step(self, batch: dict[str, Any], microbatches: list[dict[str, Any]], weights: Tensor) -> Tensor:
        """The sum of this rank's weighted losses, after forward and backward of every microbatch."""
        if self._parts.runner is None:
            return self._accumulate(microbatches, weights)
        with self._parts.streams.main.active():
            return self._parts.runner.step(batch, weights)

    def _accumulate(self, microbatches: list[dict[str, Any]], weights: Tensor) -> Tensor:
        """`_step` without a pipeline: one microbatch after the other."""
        total = torch.zeros((), device=self.device)
        for i, microbatch in enumerate(microbatches):
            self._parts.sync.prepare(last=i == len(microbatches) - 1)
            with busy("forward"):
                loss = weighted(loss_of(self(**microbatch)), weights[i])
            with busy("backward"):
                loss.backward()
            total += loss.detach()
        return total

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, a loop's own backward leaves gradients unreduced where the plan's ZeRO levels allow.

        As DistributedDataParallel's: for all microbatches of a step but the last. Forward must be inside too.
        """
        self._parts.sync.prepare(last=False)
        try:
            yield
        finally:
            self._parts.sync.prepare(last=True)

    # -- samples

    def shard_batch(self, global_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's samples of `global_batch`, on its device, for `train_step` or a forward.

        Raises UsageError when the global batch is not of the plan's size.
        """
        self._check_size(global_batch, self.plan.training.global_batch, "the global batch")
        degree = self.plan.data_parallel_degree
        rank = self._parts.meshes.data_rank(degree)
        return self._on_device({name: self._part(name, t, degree)[rank] for name, t in global_batch.items()})

    def _microbatches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        count = self.plan.training.num_microbatches
        self._check_size(batch, count * self.plan.micro_batch, "this rank's batch")
        parts = {name: self._part(name, value, count) for name, value in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(count)]

    def _part(self, name: str, value: Any, count: int) -> Any:
        """The `count` equal parts of an input along its samples; `count` times the input when it has none."""
        dim = self._batch_dims().get(name, 0)
        if dim is None or not isinstance(value, Tensor):
            return [value] * count
        return value.chunk(count, dim)

    def _check_size(self, batch: Mapping[str, Any], expected: int, what: str) -> None:
        dims, model = self._batch_dims(), self.plan.model
        lengths = {
            spec.name: model.input_shape(spec, expected)[spec.batch_dim]
            for spec in model.inputs
            if spec.batch_dim is not None
        }
        for name, value in batch.items():
            dim, length = dims.get(name, 0), lengths.get(name, expected)
            if isinstance(value, Tensor) and dim is not None and value.shape[dim] != length:
                raise UsageError(
                    f"{what} has {value.shape[dim] * expected // length} samples of {name!r}, but the plan needs "
                    f"{expected} (global batch {self.plan.training.global_batch}, {self.plan.data_parallel_degree} "
                    f"data-parallel groups); plan again with another global batch to train with more or fewer"
                )

    def _batch_dims(self) -> dict[str, int | None]:
        return {spec.name: spec.batch_dim for spec in self.plan.model.inputs}

    def _on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {n: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v for n, v in batch.items()}

    # -- update

    def optimizer(self, optimizer: str | OptimizerFactory | None = None, **options: Any) -> torch.optim.Optimizer:
        """An optimizer over this rank's parameters: a class, "adamw", "sgd", or by default the plan's.

        `options` (`lr`, `weight_decay`, ...) go to the class. Raises UnknownName.
        """
        return build_optimizer(self.parameters(), optimizer or self.plan.training.optimizer, **options)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The 2-norm of the whole model's gradients, alike on every rank, which are scaled down in place to `max_norm`.

        Use it in place of `torch.nn.utils.clip_grad_norm_`, which sees only one rank's part.
        """
        total = self._gradient_norm()
        clip_gradients(self.parameters(), max_norm, total)
        return total

    def _gradient_norm(self) -> Tensor:
        copies = [p for name, p in self.model.named_parameters() if original_name(name) in self._parts.copies]
        stages = self._parts.meshes.pipeline_group if self.plan.pipeline.degree > 1 else None
        return total_norm(self.parameters(), copies=copies, stages=stages, device=self.device)

    # -- weights

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """The whole model's parameters and persistent buffers, full, on the CPU, under their original names.

        Gathered one at a time, and kept on rank 0 only unless `all_ranks`; the others return an empty dict.
        """
        keep = all_ranks or dist.get_rank() == 0
        return {name: full.to("cpu", copy=True) for name, full in self.full_tensors() if keep}

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What `full_state_dict` gives, one tensor at a time, on this rank's device. Every rank must go through it."""
        return full_tensors(self.model, self._parts.layouts, self._parts.meshes.pipeline_group)

    @property
    def shifts_labels(self) -> bool:
        """Whether the model itself compares a position with the label that comes next."""
        return self._parts.targets.shifted

    # -- what a checkpoint holds

    def own_tensors(self) -> dict[str, Tensor]:
        """This rank's parts of parameters and persistent buffers, by original name; nothing is gathered."""
        self._free_gathered()
        return own_state(self.model)

    @property
    def random_states(self) -> tuple[Tensor, ...]:
        """What the model's next random numbers on this rank follow from."""
        return self._parts.streams.states

    @random_states.setter
    def random_states(self, states: tuple[Tensor, ...]) -> None:
        self._parts.streams.states = states

    @property
    def loss_scale_state(self) -> tuple[float, int]:
        """The loss scale of fp16 and how many good steps it has lasted; (1, 0) at other precisions."""
        scale = self._parts.loss_scale
        return (1.0, 0) if scale is None else (scale.value, scale.good_steps)

    @loss_scale_state.setter
    def loss_scale_state(self, state: tuple[float, int]) -> None:
        scale = self._parts.loss_scale
        if scale is not None:
            scale.value, scale.good_steps = state

    def _free_gathered(self) -> None:
        """Parameters gathered for an evaluation must not outlive the optimizer's next update."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
