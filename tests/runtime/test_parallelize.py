"""Training under any plan computes what one process computes on the same global batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from galv.planner.plan import Plan, ScheduleName, SequenceMode, Strategy, TensorParallelLayout
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan
from tests.runtime.training import Result, assert_equal_training, train_alone, train_in_parallel

MODES: tuple[SequenceMode, ...] = ("none", "megatron")


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
PIPELINES: dict[str, tuple[Strategy | Sequence[Strategy], ScheduleName]] = {
    "pp2 full": (strategy(recompute="full"), "gpipe"),
    "pp2 ddp": (strategy(dp=2), "1f1b"),
    "pp2 x zero1 and 2": ([strategy(dp=2, zero=1)] * 2 + [strategy(dp=2, zero=2)] * 3, "1f1b"),
    "pp2 x tp2": ([strategy(tp=2, sequence="megatron")] * 3 + [strategy(tp=2)] * 2, "gpipe"),
}
LAYOUTS = {"llama": llama_layouts, "gpt2": gpt2_layouts}


@functools.cache
def reference(model: str, optimizer: str) -> Result:
    """The single-process run, once for all plans."""
    return train_alone(model, optimizer)


def layouts_for(model: str, strategies: Strategy | Sequence[Strategy]) -> Sequence[TensorParallelLayout]:
    """The tensor-parallel layouts that the strategies use."""
    degree = (strategies if isinstance(strategies, Strategy) else strategies[0]).tp
    return [layout for mode in MODES for layout in LAYOUTS[model](degree, mode)] if degree > 1 else ()


def plan_for(model: str, name: str, num_microbatches: int = 2) -> Plan:
    """The plan of that name for that model."""
    strategies = STRATEGIES[name]
    layouts = layouts_for(model, strategies)
    return hand_made_plan(MODELS[model](), strategies, num_microbatches=num_microbatches, layouts=layouts)


# The other model adds tied weights, biases and a fused projection.
CASES = [("llama", name) for name in STRATEGIES]
CASES += [("gpt2", name) for name in ("ddp", "zero3", "tp2", "tp2 megatron x zero1", "mixed", "mixed tp2")]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_equals_one_process(pool: Pool, model: str, name: str) -> None:
    """Losses, gradient norms and updated weights of 5 clipped steps are the single-process run's."""
    optimizer = "adamw" if model == "llama" else "sgd"
    plan = plan_for(model, name)

    ranks = pool.run(train_in_parallel, plan.num_devices, model, plan, optimizer)

    assert_equal_training(reference(model, optimizer), ranks)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_pipelines_equal_one_process(pool: Pool, model: str, name: str) -> None:
    """The same over pipeline stages, tied weights on both ends included."""
    strategies, schedule = PIPELINES[name]
    layouts = layouts_for(model, strategies)
    plan = hand_made_plan(
        MODELS[model](), strategies, stages=(3, 2), schedule=schedule, num_microbatches=2, layouts=layouts
    )

    ranks = pool.run(train_in_parallel, plan.num_devices, model, plan, "sgd")

    assert_equal_training(reference(model, "sgd"), ranks)
