"""Pipelines whose stages are themselves parallel train as one device does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from galv.planner.capture.glue import glue_for
from galv.planner.plan import Plan, Recompute, Strategy
from galv.runtime.parallelize import parallelize
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, random_batch, tiny_llama_layouts
from tests.runtime.test_pipeline import STEPS, train_alone

GLOBAL_BATCH = 8


def train_parallel(name: str, plan: Plan) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of 5 steps, and on rank 0 the whole model's weights after them."""
    model = MODELS[name]()
    module = parallelize(model, plan, glue=glue_for(model, plan), device="cpu")
    optimizer = module.optimizer("sgd", lr=0.3, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(module.train_step(module.shard_batch(random_batch(GLOBAL_BATCH, step))).item())
        norms.append(module.clip_grad_norm_(1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, module.full_state_dict()


def check(pool: Pool, name: str, plan: Plan) -> None:
    """Every rank reports the losses and gradient norms of one device, and the weights are one device's."""
    losses, norms, weights = train_alone(MODELS[name](), GLOBAL_BATCH)
    results = pool.run(train_parallel, plan.num_devices, name, plan)
    for rank_losses, rank_norms, _ in results:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(rank_norms, norms, rtol=1e-3, atol=0)
    state = results[0][2]
    assert state.keys() == {key for key in weights if "inv_freq" not in key}
    for key, value in state.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-6)


def data_parallel(zero: int, recompute: Recompute = "none") -> Strategy:
    """Two data-parallel groups at a ZeRO level."""
    shard = {"dp_replicate": 2} if zero == 0 else {"dp_shard": 2}
    return Strategy(**shard, zero=zero, recompute=recompute)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pipeline_times_zero(pool: Pool, name: str, zero: int) -> None:
    """Every ZeRO level under 1F1B with 4 microbatches on uneven stages, tied embeddings included."""
    plan = hand_made_plan(
        MODELS[name](),
        data_parallel(zero),
        stages=(2, 3),
        schedule="1f1b",
        num_microbatches=4,
        global_batch=GLOBAL_BATCH,
    )
    check(pool, name, plan)


MIXED: dict[str, Sequence[Strategy]] = {
    "levels": [data_parallel(zero) for zero in (0, 3, 2, 1, 3)],
    "recompute": [data_parallel(3, r) for r in ("none", "full", "selective", "none", "none")],
}


@pytest.mark.parametrize("mixture", MIXED)
@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_pipeline_of_unlike_units(pool: Pool, name: str, mixture: str) -> None:
    """Units of one stage differ, and the two copies of the embedding have different layouts."""
    plan = hand_made_plan(
        MODELS[name](),
        MIXED[mixture],
        stages=(3, 2),
        schedule="gpipe",
        num_microbatches=2,
        global_batch=GLOBAL_BATCH,
    )
    check(pool, name, plan)


@pytest.mark.parametrize("blocks", ["none", "megatron", "mixed"])
@pytest.mark.parametrize("stages", [(2, 3), (4, 1)], ids=str)
def test_pipeline_times_tensor_parallel(pool: Pool, stages: tuple[int, int], blocks: str) -> None:
    """Whole hidden states or sequence shards cross, also where the sequence mode changes at the border."""
    plain, cut = Strategy(tp=2), Strategy(tp=2, sequence="megatron")
    middle = {"none": [plain] * 3, "megatron": [cut] * 3, "mixed": [cut, plain, cut]}[blocks]
    plan = hand_made_plan(
        MODELS["llama"](),
        [plain, *middle, plain],
        stages=stages,
        schedule="1f1b",
        num_microbatches=4,
        global_batch=GLOBAL_BATCH,
        layouts=tiny_llama_layouts(),
    )
    check(pool, "llama", plan)


@pytest.mark.parametrize("same_layout", [True, False], ids=["alike", "unlike"])
def test_tied_weights_under_tensor_parallel(pool: Pool, same_layout: bool) -> None:
    """Copies of a tied embedding may be cut alike or differently along the tensor axis."""
    plan = hand_made_plan(
        MODELS["llama-tied"](),
        Strategy(tp=2),
        stages=(3, 2),
        schedule="1f1b",
        num_microbatches=2,
        global_batch=GLOBAL_BATCH,
        layouts=tiny_llama_layouts(tied=same_layout),
    )
    check(pool, "llama-tied", plan)
