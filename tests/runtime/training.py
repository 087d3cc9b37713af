"""Trains tiny models for a few steps, in one process as the reference and on the ranks of a plan."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from galv.planner.capture.glue import glue_for
from galv.planner.plan import Plan
from galv.runtime.loss import loss_of
from galv.runtime.module import ParallelModule
from galv.runtime.parallelize import parallelize
from tests.plans import MODELS, random_batch

STEPS = 5
MAX_NORM = 0.5
"""Below the tiny models' gradient norms, so that clipping is at work."""
# A large epsilon: a gradient that is zero but for rounding must not become a step of full length.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "eps": 1e-4},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}

Result = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, gradient norms and updated weights."""


def train_alone(name: str, optimizer: str, global_batch: int = 8) -> Result:
    """What one process gets."""
    model = MODELS[name]()
    return train_model_alone(model, optimizer, global_batch)


def train_model_alone(model: nn.Module, optimizer: str, global_batch: int = 8) -> Result:
    """What one process gets, from that model's weights."""
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    update = kind(model.parameters(), **OPTIMIZERS[optimizer])
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model(**random_batch(global_batch, step)))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        update.step()
        update.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {key: value.clone() for key, value in model.state_dict().items()}


def parallelize_tiny(model: nn.Module, plan: Plan, **options: Any) -> ParallelModule:
    """A tiny model made parallel, by its traced forward where the plan needs that."""
    glue = functools.partial(glue_for, model, plan)
    return parallelize(model, plan, glue=glue, **options)


def train_in_parallel(name: str, plan: Plan, optimizer: str) -> Result:
    """What one rank gets; the weights on rank 0 only."""
    return train_model_in_parallel(MODELS[name](), plan, optimizer)


def train_model_in_parallel(model: nn.Module, plan: Plan, optimizer: str, **options: Any) -> Result:
    """What one rank gets from that model's weights; the weights on rank 0 only."""
    module = parallelize_tiny(model, plan, **options)
    update = module.optimizer(optimizer, **OPTIMIZERS[optimizer])
    losses, norms = [], []
    for step in range(STEPS):
        loss = module.train_step(module.shard_batch(random_batch(plan.training.global_batch, step)))
        norms.append(float(module.clip_grad_norm_(MAX_NORM)))
        update.step()
        update.zero_grad()
        losses.append(float(loss))
    return losses, norms, module.full_state_dict()


def assert_equal_training(expected: Result, ranks: list[Result], rtol: float = 1e-4) -> None:
    """Every rank saw the expected losses and norms, and rank 0 has the expected weights."""
    for losses, norms, _ in ranks:
        torch.testing.assert_close(losses, expected[0], rtol=rtol, atol=1e-6)
        torch.testing.assert_close(norms, expected[1], rtol=rtol, atol=1e-6)
    torch.testing.assert_close(ranks[0][2], expected[2], rtol=rtol, atol=1e-6)
