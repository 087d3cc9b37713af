"""A plain training loop over a parallel module, and the same training in one process to compare it with."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import Diverged
from galv.planner.plan import Plan
from galv.runtime.data_parallel import COMPUTE_DTYPES
from galv.runtime.loss import loss_of, microbatch_weights, valid_count, weighted
from galv.runtime.materialize import initialize
from galv.runtime.module import ParallelModule
from galv.runtime.optimizer import build_optimizer
from galv.runtime.synthetic import synthetic_batches

LEARNING_RATE = 1e-3
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class StepRecord:
    """What one training step did, as this rank saw it."""

    step: int
    """From 1."""
    loss: float
    """Mean over the global batch, before the step's update."""
    gradient_norm: float
    """Of the whole model, before clipping."""
    seconds: float
    peak_bytes: int
    """Most memory that this rank has held so far: allocated on a GPU, resident in the process on the CPU."""
    learning_rate: float = 0.0
    evaluation_loss: float | None = None
    """Mean over samples that are not trained on, after the step's update, where it was time for that."""
    optimizer_seconds: float = 0.0
    """Of `seconds`, clipping and the update."""


def train(
    module: ParallelModule,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    steps: int,
    optimizer: torch.optim.Optimizer,
    clip: float = MAX_GRADIENT_NORM,
    first_step: int = 1,
    learning_rate: Callable[[int], float] | None = None,
) -> Iterator[StepRecord]:
    """Trains on global `batches` from `first_step` to `steps` with a record after each; every rank must go through.

    Gradients are clipped to a global norm of `clip`. `learning_rate` of a step, where given, is set before its update.
    Raises Diverged, on every rank, for a loss or norm of gradients that is not finite.
    """
    for step, batch in zip(range(first_step, steps + 1), batches, strict=False):
        start = time.perf_counter()
        for group in optimizer.param_groups if learning_rate else ():
            group["lr"] = learning_rate(step)  # type: ignore[misc]  # not None here
        loss = module.train_step(module.shard_batch(batch))
        loss.item()  # waits for the device
        computed = time.perf_counter()
        norm = module.clip_grad_norm_(clip)
        check_finite(step, loss.item(), norm.item(), module.ranks_without_a_loss)
        optimizer.step()
        optimizer.zero_grad()
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        end = time.perf_counter()
        rate = float(optimizer.param_groups[0]["lr"])
        yield StepRecord(
            step,
            loss.item(),
            norm.item(),
            end - start,
            peak_bytes(module.device),
            rate,
            optimizer_seconds=end - computed,
        )


def check_finite(step: int, loss: float, norm: float = 0.0, culprits: Callable[[], list[int]] = list) -> None:
    """Nothing when both are numbers. Raises Diverged naming the step, and the ranks that `culprits` gives then."""
    name, value = ("loss", loss) if not math.isfinite(loss) else ("gradient norm", norm)
    if math.isfinite(value):
        return
    ranks = culprits()
    where = f", from the samples of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
    raise Diverged(
        f"the {name} is {value} at step {step}{where}; the weights are those of the step before. A smaller learning "
        "rate, or a longer mantissa (--precision bf16 or fp32 in place of fp16), may help"
    )


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held on `device`; for the CPU, resident, with everything that it has."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


# ----------------------------------------------------------------------------------------------- one process


def single_process_losses(
    model: nn.Module,
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
    clip: float = MAX_GRADIENT_NORM,
    **options: Any,
) -> list[float]:
    """The losses of the training that the plan describes, done by one process without any parallelism.

    Weights, data, optimizer (`options` go to it), clipping and precision are those of `galv run` with this `seed`;
    `model`, on the meta device, is initialized in place. Raises Diverged for a loss that is not finite.
    """
    place = torch.device(device)
    initialize(model, seed, place).train()
    optimizer = build_optimizer(model.parameters(), plan.training.optimizer, **{"lr": LEARNING_RATE, **options})
    losses = []
    for step, batch in zip(range(1, steps + 1), synthetic_batches(plan, seed), strict=False):
        losses.append(_accumulate(model, plan, {name: tensor.to(place) for name, tensor in batch.items()}))
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        check_finite(step, losses[-1], norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _accumulate(model: nn.Module, plan: Plan, batch: Mapping[str, Tensor]) -> float:
    """The mean loss over the global batch, microbatch by microbatch; leaves its gradients."""
    num_parts = plan.training.global_batch // plan.micro_batch
    parts = [_part(plan, batch, i, num_parts) for i in range(num_parts)]
    weights = microbatch_weights(torch.stack([valid_count(model, part) for part in parts]), None, 1)
    total = 0.0
    for part, weight in zip(parts, weights, strict=True):
        loss = weighted(_loss(model, plan, part), weight)
        loss.backward()
        total += loss.item()
    return total


def _part(plan: Plan, batch: Mapping[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    dims = {spec.name: spec.batch_dim for spec in plan.model.inputs}
    return {
        name: tensor if (dim := dims[name]) is None else tensor.chunk(count, dim)[index]
        for name, tensor in batch.items()
    }


def _loss(model: nn.Module, plan: Plan, batch: dict[str, Tensor]) -> Tensor:
    """The loss computed in the plan's precision: with parameters cast for the moment, as FSDP does."""
    dtype = COMPUTE_DTYPES[plan.training.precision]
    if dtype == torch.float32:
        return loss_of(model(**batch))
    cast = {name: p.to(dtype) for name, p in model.named_parameters() if p.is_floating_point()}
    inputs = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    return loss_of(torch.func.functional_call(model, cast, args=(), kwargs=inputs))
