"""Blocks whose sequence is cut over a context axis train as one device does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph
from galv.planner.plan import ContextMode, Plan, Recompute, SequenceLayout, Strategy, TensorParallelLayout
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan, random_batch
from tests.runtime.training import Result, assert_equal_training, train_alone, train_in_parallel

TENSOR = {"llama": llama_layouts, "gpt2": gpt2_layouts}


@functools.cache
def reference(model: str) -> Result:
    """The single-process run, once for all plans."""
    return train_alone(model, "sgd")


@functools.cache
def graph(model: str) -> ModelGraph:
    """The captured model, for its sequence layouts."""
    return capture(
        resolve_model(MODELS[model], lambda n: random_batch(n, 0)), precision="fp32", device_kind="cpu"
    )


def sequence_layout(model: str, mode: ContextMode, degree: int) -> SequenceLayout:
    """How the model's blocks are cut, as the planner finds it."""
    (block,) = [unit for unit in graph(model).classes if unit not in ("embedding", "head")]
    found = graph(model).source.sequence_layout(block, mode, degree)
    assert isinstance(found, SequenceLayout), found
    return found.model_copy(update={"unit_class": "block"})


def context(
    mode: ContextMode, cp: int, *, tp: int = 1, dp: int = 1, zero: int = 0, recompute: Recompute = "none"
) -> Strategy:
    """A block's strategy."""
    axis = "dp_shard" if zero else "dp_replicate"
    return Strategy.model_validate(
        {"tp": tp, "cp": cp, "sequence": mode, axis: dp, "zero": zero, "recompute": recompute}
    )


def plan_of(model: str, around: Strategy, blocks: Sequence[Strategy], **options: Any) -> Plan:
    """Embedding and head under `around`, three blocks under `blocks`."""
    strategies = [around, *blocks, around]
    layouts: dict[tuple[str, int, str], TensorParallelLayout] = {}
    for tp in {strategy.tp for strategy in strategies} - {1}:
        for mode in ("none", "megatron"):
            layouts |= {(x.unit_class, x.degree, x.sequence): x for x in TENSOR[model](tp, mode)}
    cuts = {(s.sequence, s.cp) for s in blocks if s.cp > 1}
    plan = hand_made_plan(MODELS[model](), [around] * 5, layouts=tuple(layouts.values()), **options)
    units = [
        [unit.model_copy(update={"strategy": strategies.pop(0)}) for unit in stage.units] for stage in plan.stages
    ]
    data = plan.model_dump() | {
        "stages": [{"units": [unit.model_dump() for unit in stage]} for stage in units],
        "sequence_layouts": [sequence_layout(model, mode, degree).model_dump() for mode, degree in sorted(cuts)],
    }
    return Plan.model_validate(data)


def check(pool: Pool, model: str, plan: Plan) -> None:
    """Losses, gradient norms and weights of clipped steps are those of one device; the plan comes from a file."""
    ranks = pool.run(train_in_parallel, plan.num_devices, model, Plan.from_json(plan.to_json()), "sgd")
    assert_equal_training(reference(model), ranks)


TP2, TP4 = Strategy(tp=2), Strategy(tp=4)
DP2, DP4 = Strategy(dp_replicate=2), Strategy(dp_replicate=4)
TWO = Strategy(tp=2, dp_replicate=2)

CASES: dict[str, tuple[Strategy, list[Strategy], dict[str, Any]]] = {
    "ulysses 2": (TP2, [context("ulysses", 2)] * 3, {}),
    "ring 2": (TP2, [context("ring", 2)] * 3, {"num_microbatches": 2}),
    "ulysses 4": (TP4, [context("ulysses", 4)] * 3, {}),
    "ring 4": (TP4, [context("ring", 4)] * 3, {}),
    "around it data parallel": (DP4, [context("ring", 2, dp=2), context("ulysses", 4), DP4], {}),
    "zero and recompute": (
        TWO,
        [
            context("ring", 2, dp=2, zero=3, recompute="full"),
            context("ulysses", 2, dp=2, zero=1, recompute="full"),
            context("ring", 2, dp=2, zero=2, recompute="selective"),
        ],
        {"num_microbatches": 2},
    ),
    "tensor and context": (
        TP4,
        [context("ring", 2, tp=2), context("ulysses", 2, tp=2, recompute="full"), context("ring", 2, tp=2, zero=3)],
        {},
    ),
    "beside others": (TWO, [TWO, context("ring", 2, dp=2), Strategy(tp=2, dp_replicate=2, sequence="megatron")], {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_equals_one_device(pool: Pool, model: str, case: str) -> None:
    """Grouped heads with rotary tables, and positions that are learned; two chunks a rank under causal rings."""
    around, blocks, options = CASES[case]
    check(pool, model, plan_of(model, around, blocks, **options))
