"""Interleaved and zero-bubble pipelines of stages that are parallel themselves train as one device does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from galv.planner.plan import Plan, Recompute, ScheduleName, Strategy
from galv.runtime import transfers
from galv.runtime.materialize import initialize
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan
from tests.runtime.training import assert_equal_training, parallelize_tiny, train_alone, train_in_parallel

TP = Strategy(tp=2)
LAYOUTS = {"llama": llama_layouts(2, "none"), "gpt2": gpt2_layouts(2, "none")}


def sharded(zero: int, recompute: Recompute = "none") -> Strategy:
    """Two data-parallel groups at a ZeRO level."""
    if zero == 0:
        return Strategy(dp_replicate=2, recompute=recompute)
    return Strategy(dp_shard=2, zero=zero, recompute=recompute)


def plan_for(
    name: str, schedule: ScheduleName, stages: tuple[int, ...], strategy: Strategy, num_microbatches: int
) -> Plan:
    """Of a tiny model; chunks of as many units as `stages` says."""
    virtual = {"interleaved": len(stages) // 2, "zbv": 2}.get(schedule, 1)
    return hand_made_plan(
        MODELS[name](),
        strategy,
        stages=stages,
        schedule=schedule,
        num_microbatches=num_microbatches,
        global_batch=2 * num_microbatches,
        virtual_stages=virtual,
        layouts=LAYOUTS[name] if strategy.tp > 1 else (),
    )


def groups_of_directions() -> list[list[int]]:
    """The ranks of the groups for messages up and down, as they are made for NCCL."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with patch.object(transfers.dist, "get_backend", lambda group: "nccl"):
        up, down = transfers.directions(mesh, "pp")
    assert up is not down
    return [dist.get_process_group_ranks(group) for group in (up, down)]


def test_each_direction_has_a_group(pool: Pool) -> None:
    """Under NCCL, ranks that both send first must not share a communicator."""
    assert pool.run(groups_of_directions, 4) == [[[0, 2]] * 2, [[1, 3]] * 2] * 2


CASES = [
    ("gpt2", "interleaved", (1, 1, 2, 1), sharded(2), 3),
    ("gpt2", "interleaved", (1, 1, 2, 1), TP, 4),
    ("llama", "interleaved", (1, 1, 2, 1), sharded(3, "full"), 4),
    ("gpt2", "zb-h1", (3, 2), sharded(0), 4),
    ("llama", "zb-h1", (2, 3), sharded(1), 3),
    ("llama-tied", "zb-h1", (2, 3), sharded(2, "selective"), 3),
    ("llama", "zb-h1", (2, 3), sharded(3), 4),
    ("gpt2", "zb-h1", (2, 3), TP, 4),
    ("gpt2", "zbv", (1, 2, 1, 1), sharded(3), 4),
    ("llama", "zbv", (2, 1, 1, 1), sharded(2), 3),
    ("llama-tied", "zbv", (1, 2, 1, 1), sharded(3, "full"), 4),
    ("llama", "zbv", (1, 1, 2, 1), TP, 4),
]


@pytest.mark.parametrize("name, schedule, stages, strategy, num_microbatches", CASES, ids=str)
def test_trains_as_one_device(
    pool: Pool, name: str, schedule: ScheduleName, stages: tuple[int, ...], strategy: Strategy, num_microbatches: int
) -> None:
    """Losses, gradient norms and all weights, with uneven chunks and any number of microbatches."""
    plan = plan_for(name, schedule, stages, strategy, num_microbatches)
    ranks = pool.run(train_in_parallel, plan.num_devices, name, plan, "sgd")
    assert_equal_training(train_alone(name, "sgd", plan.training.global_batch), ranks)


def test_half_precision_has_one_gradient_type(pool: Pool) -> None:
    """In bf16 the gradients of both parts of backward are summed and reduced in fp32, as those of a whole one are."""
    found = []
    for schedule, stages in (("1f1b", (2, 3)), ("zb-h1", (2, 3)), ("zbv", (1, 2, 1, 1))):
        plan = plan_for("gpt2", schedule, stages, sharded(2), 3)  # type: ignore[arg-type]
        plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "bf16"})})
        losses, norms, _ = pool.run(train_in_parallel, 4, "gpt2", plan, "sgd")[0]
        found.append([*losses, *norms])
    for values in found[1:]:
        assert values == pytest.approx(found[0], rel=1e-4)


def first_weights(plan: Plan) -> dict[str, Tensor]:
    """What a model on the meta device starts from."""
    with torch.device("meta"):
        model = MODELS["gpt2"]()
    return parallelize_tiny(model, plan, seed=3).full_state_dict()


def test_chunks_start_from_the_weights_of_one_device(pool: Pool) -> None:
    """Drawn chunk by chunk, with a tied weight on two chunks of one rank."""
    with torch.device("meta"):
        model = MODELS["gpt2"]()
    expected = initialize(model, seed=3).state_dict()
    found, *_ = pool.run(first_weights, 2, plan_for("gpt2", "zbv", (1, 2, 1, 1), Strategy(), 2))

    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
