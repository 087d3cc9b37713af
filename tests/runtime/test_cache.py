"""A Hugging Face model that comes with its key-value cache switched on trains without it."""

from __future__ import annotations

import pytest
from torch import nn

from galv.planner.plan import Recompute, Strategy
from galv.runtime.parallelize import parallelize
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, random_batch


def train_with_cache(recompute: Recompute) -> float:
    """The loss of a step under recomputation of a model whose configuration asks for a cache."""
    model: nn.Module = MODELS["gpt2"]()
    model.config.use_cache = True  # type: ignore[union-attr]  # a Hugging Face model
    plan = hand_made_plan(model, Strategy(dp_shard=2, zero=3, recompute=recompute))
    module = parallelize(model, plan)
    return float(module.train_step(module.shard_batch(random_batch(8, 0))))


def test_recomputation_does_not_meet_a_cache(pool: Pool) -> None:
    """The loss is that of the model without a cache, under both recompute levels."""
    expected = float(MODELS["gpt2"]()(**random_batch(8, 0)).loss.detach())
    for recompute in ("selective", "full"):
        assert pool.run(train_with_cache, 2, recompute) == pytest.approx([expected] * 2, rel=1e-4)
