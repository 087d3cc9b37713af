"""Made-up training data of the plan's shapes, the same for every layout of the plan: a model can learn from it.

Tokens follow a fixed cycle through a few dozen of the vocabulary's tokens, with some noise, so that the loss falls
within a few steps, first to the entropy of that subset, then below it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from galv.planner.plan import InputSpec, Plan

NUM_TOKENS = 64
"""Tokens of the vocabulary that occur."""
NOISE = 0.1
"""Share of tokens that do not follow the cycle."""
_DEFAULT_HIGH = 2


def synthetic_batches(plan: Plan, seed: int = 0, first_step: int = 0) -> Iterator[dict[str, Tensor]]:
    """Global batches without end, on the CPU: batch i of a seed is the same in every process and for every layout.

    The first is that of `first_step`, counted from 0.

    Integer inputs that count tokens follow the cycle, others are uniform below their bound; `labels` of the shape of
    `input_ids` equal them; an `attention_mask` masks nothing; other numbers are normal.
    """
    step = first_step
    while True:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
        cycle = torch.randperm(_vocabulary(plan), generator=torch.Generator().manual_seed(seed))[:NUM_TOKENS]
        batch = {spec.name: _values(plan, spec, cycle, generator) for spec in plan.model.inputs}
        if "labels" in batch and _alike(batch.get("input_ids"), batch["labels"]):
            batch["labels"] = batch["input_ids"].clone()
        yield batch
        step += 1


def _alike(first: Tensor | None, second: Tensor) -> bool:
    return first is not None and first.shape == second.shape and first.dtype == second.dtype


def _vocabulary(plan: Plan) -> int:
    return next((spec.high or _DEFAULT_HIGH for spec in plan.model.inputs if spec.name == "input_ids"), NUM_TOKENS)


def _values(plan: Plan, spec: InputSpec, cycle: Tensor, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = plan.model.input_shape(spec, plan.training.global_batch)
    if spec.name == "attention_mask":
        return torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if spec.name == "input_ids" and spec.batch_dim == 0:
        return _tokens(shape, cycle, generator).to(dtype)
    return torch.randint(0, spec.high or _DEFAULT_HIGH, shape, generator=generator).to(dtype)


def _tokens(shape: tuple[int, ...], cycle: Tensor, generator: torch.Generator) -> Tensor:
    """Samples that walk along `cycle` from a place of their own, now and then stepping beside it."""
    start = torch.randint(0, len(cycle), (shape[0], *(1 for _ in shape[1:])), generator=generator)
    clean = cycle[(start + torch.arange(shape[-1])) % len(cycle)].expand(shape)
    stray = cycle[torch.randint(0, len(cycle), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < NOISE, stray, clean)
