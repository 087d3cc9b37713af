"""Blocks whose sequence is cut over a context axis train as one device does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import galv
from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph
from galv.planner.plan import ContextMode, Layout, Plan, Recompute, SequenceLayout, Strategy, TensorParallelLayout
from galv.runtime.sequence_parallel import ContextRanks, apply_sequence_parallel
from tests.distributed_pool import Pool
from tests.families import pipelined
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, SEQ_LEN, VOCABULARY, hand_made_plan, random_batch
from tests.runtime.training import Result, assert_equal_training, train_alone, train_in_parallel

TENSOR = {"llama": llama_layouts, "gpt2": gpt2_layouts}


@functools.cache
def reference(model: str) -> Result:
    """The single-process run, once for all plans."""
    return train_alone(model, "sgd")


@functools.cache
def graph(model: str) -> ModelGraph:
    """The captured model, for its sequence layouts."""
    return capture(resolve_model(MODELS[model], lambda n: random_batch(n, 0)), precision="fp32", device_kind="cpu")


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
    cuts = {(s.sequence, s.cp) for s in blocks if s.sequence in ("ulysses", "ring")}
    plan = hand_made_plan(MODELS[model](), [around] * 5, layouts=tuple(layouts.values()), **options)
    units = [[unit.model_copy(update={"strategy": strategies.pop(0)}) for unit in stage.units] for stage in plan.stages]
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


@pytest.mark.parametrize(
    ("model", "case"),
    [*(("llama", case) for case in CASES), ("gpt2", "ulysses 2"), ("gpt2", "ring 4"), ("gpt2", "tensor and context")],
)
def test_equals_one_device(pool: Pool, model: str, case: str) -> None:
    """Grouped heads with rotary tables, and positions that are learned; two chunks a rank under causal rings."""
    around, blocks, options = CASES[case]
    check(pool, model, plan_of(model, around, blocks, **options))


def test_through_a_pipeline(pool: Pool) -> None:
    """A stage border within the cut and one behind it; the next stage's first unit puts the sequence together."""
    blocks = [context("ring", 2, zero=1), context("ring", 2), context("ulysses", 2, recompute="full")]
    for stages in ((2, 3), (4, 1)):
        plan = plan_of("llama", TP2, blocks, stages=stages, schedule="1f1b", num_microbatches=2)
        check(pool, "llama", plan)


# ----------------------------------------------------------------------------------------------- masks


def tiny_bert() -> nn.Module:
    """A BERT whose dropout does nothing."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=SEQ_LEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).train()


def padded_batch(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Samples of different lengths; in some of them all that one rank has is padding."""
    batch = random_batch(num_samples, seed)
    lengths = torch.arange(num_samples).unsqueeze(1) % 5 * 3 + 4
    return {**batch, "attention_mask": (torch.arange(SEQ_LEN) < lengths).long()}


def train_bert(plan: Plan | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two steps, on one device without a plan."""
    model = tiny_bert()
    module = None if plan is None else galv.parallelize(model, plan)
    optimizer = torch.optim.SGD((module or model).parameters(), lr=0.3)
    losses = []
    for step in range(2):
        batch = padded_batch(4, step)
        if module is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            loss = module.train_step(module.shard_batch(batch))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict() if module is None else module.full_state_dict()


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_attention_that_sees_all_but_padding(pool: Pool, mode: ContextMode) -> None:
    """BERT, as captured, with its mask over the whole sequence."""
    found = capture(resolve_model(tiny_bert, padded_batch), precision="fp32", device_kind="cpu")
    cut = found.source.sequence_layout("BertLayer", mode, 2)
    assert isinstance(cut, SequenceLayout), cut
    assert "R" in {str(layout) for layouts in cut.arguments.values() for layout in layouts}, "the mask stays whole"
    found_around = (found.source.layout(name, 2, "none") for name in ("embedding", "head"))
    around = [layout for layout in found_around if isinstance(layout, TensorParallelLayout)]
    plan = pipelined(found, (), 4).model_dump()
    plan["cluster"]["devices_per_node"] = 2
    plan |= {"layouts": [layout.model_dump() for layout in around], "sequence_layouts": [cut.model_dump()]}
    for unit in plan["stages"][0]["units"]:
        strategy = context(mode, 2) if unit["unit_class"] == "BertLayer" else TP2
        unit["strategy"] = strategy.model_dump()
    expected = train_bert(None)
    for losses, weights in pool.run(train_bert, 2, Plan.model_validate(plan)):
        assert losses == pytest.approx(expected[0], rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[1][name], rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------- random numbers


class _Dropping(nn.Module):
    """A block that shows what it drops."""

    def forward(self, x: Tensor) -> Tensor:
        """Half of it."""
        return F.dropout(x, 0.5)


def dropped() -> tuple[Tensor, Tensor, Tensor]:
    """What is drawn in a block, again when it is recomputed, and behind it."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    ranks = ContextRanks(group, "cpu")
    arguments = {"0": (Layout(kind="S", dim=1),)}
    layout = SequenceLayout(
        unit_class="block", mode="ring", degree=2, arguments=arguments, activation="0", output_dim=1
    )
    block = _Dropping()
    apply_sequence_parallel(block, layout, ranks, torch.device("cpu"))
    x = torch.ones(1, 64, 2, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False)
    (of_x,) = torch.autograd.grad(out, [x], torch.ones_like(out))
    return out.detach(), of_x, torch.rand(4)


def test_ranks_drop_different_parts(pool: Pool) -> None:
    """Differently on each rank, the same when recomputed, and alike again behind the block."""
    first, second = pool.run(dropped, 2)

    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[0], first[1])
    torch.testing.assert_close(first[2], second[2])
