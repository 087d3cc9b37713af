"""Pipelines of stages that are parallel themselves, where neighbours differ: each trains as one device does."""

from __future__ import annotations

import pytest

from galv.planner.plan import Plan, Recompute, Strategy
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan
from tests.runtime.training import assert_equal_training, train_alone, train_in_parallel

PLAIN, CUT = Strategy(tp=2), Strategy(tp=2, sequence="megatron")
LLAMA = (*llama_layouts(2, "none"), *llama_layouts(2, "megatron"))
GPT2 = (*gpt2_layouts(2, "none"), *gpt2_layouts(2, "megatron"))


def sharded(zero: int, recompute: Recompute = "none") -> Strategy:
    """Two data-parallel groups at a ZeRO level."""
    if zero == 0:
        return Strategy(dp_replicate=2, recompute=recompute)
    return Strategy(dp_shard=2, zero=zero, recompute=recompute)


def check(pool: Pool, name: str, plan: Plan) -> None:
    """Losses, gradient norms and weights are those of one device."""
    ranks = pool.run(train_in_parallel, plan.num_devices, name, plan, "sgd")
    assert_equal_training(train_alone(name, "sgd", plan.training.global_batch), ranks)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_level_reduces_gradients_right(pool: Pool, zero: int) -> None:
    """Each ZeRO level with more microbatches in flight than one, alternating with backwards, on uneven stages."""
    model = MODELS["gpt2"]()
    plan = hand_made_plan(model, sharded(zero), stages=(1, 4), schedule="1f1b", num_microbatches=4)
    check(pool, "gpt2", plan)


@pytest.mark.parametrize(
    "strategies",
    [
        [sharded(zero) for zero in (0, 3, 2, 1, 3)],
        [sharded(3, "full"), sharded(3, "selective"), sharded(1, "full"), sharded(3), sharded(0)],
    ],
    ids=["levels", "recompute"],
)
def test_unlike_units(pool: Pool, strategies: list[Strategy]) -> None:
    """Units of one stage differ, and the copies of the tied embedding have different layouts."""
    model = MODELS["llama-tied"]()
    plan = hand_made_plan(model, strategies, stages=(3, 2), schedule="gpipe", num_microbatches=2)
    check(pool, "llama-tied", plan)


@pytest.mark.parametrize("blocks", [(CUT, CUT, CUT), (PLAIN, CUT, PLAIN), (CUT, PLAIN, CUT)], ids=["cut", "in", "out"])
@pytest.mark.parametrize("stages", [(2, 3), (4, 1)], ids=str)
def test_sequence_shards_cross(pool: Pool, stages: tuple[int, int], blocks: tuple[Strategy, ...]) -> None:
    """Shards of the sequence cross as shards, also where the layout changes right at the border."""
    units = [PLAIN, *blocks, PLAIN]
    model = MODELS["llama"]()
    plan = hand_made_plan(model, units, stages=stages, schedule="1f1b", num_microbatches=4, layouts=LLAMA)
    check(pool, "llama", plan)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_tied_weights_under_tensor_parallel(pool: Pool, name: str) -> None:
    """Copies of a tied embedding may be cut alike along the tensor axis (GPT-2's here) or differently (Llama's)."""
    layouts = GPT2 if name == "gpt2" else LLAMA
    plan = hand_made_plan(MODELS[name](), PLAIN, stages=(3, 2), schedule="1f1b", num_microbatches=2, layouts=layouts)
    check(pool, name, plan)
