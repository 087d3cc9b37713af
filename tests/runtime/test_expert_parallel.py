"""Experts shared out over ranks train like those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from galv.planner.plan import ExpertLayout, ExpertsModule, Plan, Strategy
from galv.runtime.expert_parallel import Exchange
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan
from tests.runtime.training import assert_equal_training, train_alone, train_in_parallel

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


def sharing(ep: int, dp: int, zero: int, recompute: str = "none", **plan: Any) -> Plan:
    """A plan for a tiny Mixtral whose blocks share their experts."""
    shard = dp if zero else 1
    around = Strategy(dp_shard=shard, dp_replicate=dp // shard, zero=zero)
    block = Strategy.model_validate(around.model_dump() | {"ep": ep, "recompute": recompute})
    return hand_made_plan(MODELS["mixtral"](), [around, block, block, around], experts=(MIXTRAL,), **plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [2, 4])
def test_equals_one_device(pool: Pool, ep: int, zero: int) -> None:
    """Losses, clipping norms and weights, at every level, with as many ranks as share the experts and with more."""
    plan = sharing(ep, 4, zero, "full" if zero == 3 else "none", num_microbatches=2)
    expected = train_alone("mixtral", "adamw")
    ranks = pool.run(train_in_parallel, 4, "mixtral", plan, "adamw")
    assert_equal_training(expected, ranks)
