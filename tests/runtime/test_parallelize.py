"""Training under any plan computes what one process computes on the same global batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from galv.planner.plan import Plan, Strategy, TensorParallelLayout
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan
from tests.runtime.training import Result, assert_equal_training, train_alone, train_in_parallel

NUM_UNITS = 5


def strategy(**fields: object) -> Strategy:
    """A strategy; `dp` goes to sharding where the ZeRO level shards."""
    dp = fields.pop("dp", 1)
    axis = "dp_shard" if fields.get("zero", 0) else "dp_replicate"
    return Strategy.model_validate({axis: dp, **fields})


MIXED = [
    strategy(dp=4, zero=1),
    strategy(dp_replicate=2, dp_shard=2, zero=3, recompute="full"),
    strategy(dp=4, zero=0, recompute="selective"),
    strategy(dp=4, zero=2),
    strategy(dp=4, zero=3),
]
MIXED_TP = [
    strategy(tp=2, dp=2, zero=1),
    strategy(tp=2, dp=2, zero=3, sequence="megatron"),
    strategy(tp=2, dp=2, zero=0, recompute="full"),
    strategy(tp=2, dp=2, zero=2, sequence="megatron", recompute="selective"),
    strategy(tp=2, dp=2, zero=3),
]
STRATEGIES: dict[str, Strategy | Sequence[Strategy]] = {
    "one": strategy(),
    "ddp": strategy(dp=2),
    "zero1": strategy(dp=2, zero=1),
    "zero2": strategy(dp=2, zero=2),
    "zero3": strategy(dp=2, zero=3),
    "hybrid zero3": strategy(dp_replicate=2, dp_shard=2, zero=3),
    "tp2": strategy(tp=2),
    "tp2 megatron": strategy(tp=2, sequence="megatron"),
    "tp2 x zero3": strategy(tp=2, dp=2, zero=3),
    "tp2 megatron x zero1": strategy(tp=2, dp=2, zero=1, sequence="megatron"),
    "ddp full": strategy(dp=2, recompute="full"),
    "zero3 full": strategy(dp=2, zero=3, recompute="full"),
    "zero3 selective": strategy(dp=2, zero=3, recompute="selective"),
    "tp2 megatron full": strategy(tp=2, sequence="megatron", recompute="full"),
    "tp2 selective": strategy(tp=2, recompute="selective"),
    "mixed": MIXED,
    "mixed tp2": MIXED_TP,
}
LAYOUTS = {"llama": llama_layouts, "gpt2": gpt2_layouts}


@functools.cache
def reference(model: str, optimizer: str) -> Result:
    """The single-process run, once for all plans."""
    return train_alone(model, optimizer)


def plan_for(model: str, name: str, num_microbatches: int = 2) -> Plan:
    """The plan of that name for that model."""
    strategies = STRATEGIES[name]
    first = strategies if isinstance(strategies, Strategy) else strategies[0]
    layouts: tuple[TensorParallelLayout, ...] = ()
    if first.tp > 1:
        layouts = (*LAYOUTS[model](first.tp, "none"), *LAYOUTS[model](first.tp, "megatron"))
    return hand_made_plan(MODELS[model](), strategies, num_microbatches=num_microbatches, layouts=layouts)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_equals_one_process(pool: Pool, model: str, name: str) -> None:
    """Losses, gradient norms and updated weights of 5 clipped steps are the single-process run's."""
    optimizer = "adamw" if model == "llama" else "sgd"
    plan = plan_for(model, name)

    ranks = pool.run(train_in_parallel, plan.num_devices, model, plan, optimizer)

    assert_equal_training(reference(model, optimizer), ranks)
