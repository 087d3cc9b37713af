"""Experts shared out over ranks train like those of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import galv
from galv.planner.assemble import EVEN_ROUTING
from galv.planner.plan import ExpertLayout, ExpertsModule, Plan, Strategy
from galv.runtime.expert_parallel import Exchange
from galv.runtime.materialize import initialize
from tests.distributed_pool import Pool
from tests.models.experts import Mixture
from tests.plans import MODELS, SEQ_LEN, hand_made_plan, random_batch
from tests.runtime.training import (
    Result,
    assert_equal_training,
    train_alone,
    train_in_parallel,
    train_model_alone,
    train_model_in_parallel,
)

MIXTRAL = ExpertLayout(
    unit_class="block",
    num_experts=4,
    modules=(
        ExpertsModule(
            module="mlp.experts",
            parameters=("gate_up_proj", "down_proj"),
            tokens="0",
            choices="1",
            weights="2",
            counts=("num_experts",),
        ),
    ),
)


def sharing(ep: int, dp: int, zero: int, recompute: str = "none", *, replicas: int = 1, **plan: Any) -> Plan:
    """A plan for a tiny Mixtral whose blocks share their experts, sharded over 1/`replicas` of the ranks."""
    shard = dp // replicas if zero else 1
    around = Strategy(dp_shard=shard, dp_replicate=dp // shard, zero=zero)
    block = Strategy.model_validate(around.model_dump() | {"ep": ep, "recompute": recompute})
    return hand_made_plan(MODELS["mixtral"](), [around, block, block, around], experts=(MIXTRAL,), **plan)


@pytest.mark.parametrize(("ep", "zero"), [(2, 0), (4, 1), (2, 2), (4, 3)])
def test_equals_one_device(pool: Pool, ep: int, zero: int) -> None:
    """Losses, clipping norms and weights, at every level, with as many ranks as share the experts and with more."""
    plan = sharing(ep, 4, zero, "full" if zero == 3 else "none", num_microbatches=2)
    ranks = pool.run(train_in_parallel, 4, "mixtral", plan, "sgd")
    assert_equal_training(alone("mixtral"), ranks)


@pytest.mark.parametrize("ep", [2, 4])
def test_hybrid_sharding(pool: Pool, ep: int) -> None:
    """Experts shared within each of two groups of sharding ranks, or over both groups."""
    plan = sharing(ep, 4, 2, num_microbatches=2, replicas=2)
    ranks = pool.run(train_in_parallel, 4, "mixtral", plan, "sgd")
    assert_equal_training(alone("mixtral"), ranks)


@lru_cache
def alone(name: str) -> Result:
    """One process's losses, norms and weights."""
    return train_alone(name, "sgd")


def test_pipeline_of_shared_experts(pool: Pool) -> None:
    """Two stages, in each two ranks that share experts; recomputation of products only."""
    plan = sharing(2, 2, 2, "selective", stages=[2, 2], schedule="1f1b", num_microbatches=2)
    ranks = pool.run(train_in_parallel, 4, "mixtral", plan, "sgd")
    assert_equal_training(alone("mixtral"), ranks)


@pytest.mark.parametrize("name", ["one expert", "eager"])
def test_ranks_without_tokens(pool: Pool, name: str) -> None:
    """A router that gives all tokens to the same experts leaves ranks idle; a loop over experts then skips them."""
    expected = train_idle_alone(name)
    ranks = pool.run(train_idle, 4, name, sharing(4, 4, 3))
    assert_equal_training(expected, ranks)


def lopsided(name: str) -> nn.Module:
    """A tiny Mixtral that routes all tokens of the first block to experts 1 and 2."""
    model = MODELS["mixtral"]()
    first = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        first.mlp.gate.weight.zero_()
        first.mlp.gate.weight[:, 0] = torch.tensor([-1.0, 1.0, 0.9, -1.0])
    model.config._experts_implementation = "eager" if name == "eager" else "grouped_mm"
    return model


def train_idle(name: str, plan: Plan) -> Result:
    """What one rank gets."""
    return train_model_in_parallel(lopsided(name), plan, "sgd")


def train_idle_alone(name: str) -> Result:
    """What one process gets; all the time, the first block's tokens go to two experts only."""
    model, chosen = lopsided(name), set[int]()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *call: chosen.update(call[2][2].flatten().tolist()))
    result = train_model_alone(model, "sgd")
    assert chosen == {1, 2}
    return result


# ----------------------------------------------------------------------------------------------- as captured


@pytest.mark.parametrize("zero", [0, 3])
def test_a_plain_mixture_equals_one_device(pool: Pool, zero: int) -> None:
    """Experts that nothing names are found, shared out from the meta device on, and train like those of one device."""
    with torch.device("meta"):
        alone = Mixture()
    expected = train_model_alone(initialize(alone, seed=1), "sgd")
    plan = captured(Mixture, ep=2, zero=zero)
    assert EVEN_ROUTING in plan.notes
    ranks = pool.run(train_mixture, 4, plan.to_json())
    assert_equal_training(expected, ranks)


def train_mixture(text: str) -> Result:
    """What one rank gets of a model on the meta device."""
    with torch.device("meta"):
        model = Mixture()
    return train_model_in_parallel(model, Plan.from_json(text), "sgd", seed=1)


def captured(build: Callable[[], nn.Module], **layout: Any) -> Plan:
    """The plan of a layout by hand on four ranks."""
    return galv.estimate(
        build(),
        random_batch(2, 0),
        cluster="cpu:4x1",
        seq_len=SEQ_LEN,
        global_batch=8,
        precision="fp32",
        **layout,
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_beside_a_tensor_axis(pool: Pool, ep: int) -> None:
    """Every expert is cut over two ranks, each with half of the experts or all."""
    plan = captured(MODELS["mixtral"], ep=ep, tp=2, zero=3, sequence="megatron")
    experts = next(m for layout in plan.layouts for m in layout.modules if m.module == "mlp.experts")
    assert {name: str(change.source) for name, change in experts.parameters.items()} == {
        "gate_up_proj": "S1x2",
        "down_proj": "S2",
    }
    ranks = pool.run(train_in_parallel, 4, "mixtral", plan, "sgd")
    assert_equal_training(alone("mixtral"), ranks)


# ----------------------------------------------------------------------------------------------- the exchange

ROWS = {"even": [[1, 1], [1, 1]], "none for one": [[3, 0], [2, 0]], "none of one": [[0, 0], [2, 1]]}
"""For each of two ranks its rows for each of two experts, one a rank."""


@pytest.mark.parametrize("case", ROWS)
def test_exchange(pool: Pool, case: str) -> None:
    """Rows reach the ranks of their experts and come back as they were; gradients too."""
    for there, back, gradient in pool.run(exchange, 2, case):
        torch.testing.assert_close(there, torch.full_like(there, 1.0))
        torch.testing.assert_close(back, torch.full_like(back, 10.0))
        torch.testing.assert_close(gradient, torch.full_like(gradient, 10.0))


def exchange(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that reach this rank over what they say they are for, rows that came back over what was sent, gradients."""
    rank = dist.get_rank()
    counts = torch.tensor(ROWS[case][rank])
    rows = torch.arange(1, 3).repeat_interleave(counts).float()[:, None].expand(-1, 3).clone().requires_grad_()
    route = Exchange(counts, dist.group.WORLD)
    came = route.there(rows)
    arrived = sum(ROWS[case][source][rank] for source in range(2))
    assert came.shape == (max(arrived, 1), 3)
    assert route.experts.tolist() == [0] * max(arrived, 1)
    back = route.back(came * 10)
    back.sum().backward()
    assert rows.grad is not None
    return came.detach()[:arrived] / (rank + 1), back.detach() / rows.detach(), rows.grad
