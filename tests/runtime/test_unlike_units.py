"""Units with different meshes side by side: any mixture of degrees trains as one device does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from galv.planner.plan import Plan, Recompute, Strategy
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts, llama_layouts
from tests.plans import MODELS, hand_made_plan, random_batch
from tests.runtime.training import assert_equal_training, parallelize_tiny, train_alone, train_in_parallel

pytestmark = pytest.mark.slow

WORLD = 4
LAYOUTS = {
    "llama": (*llama_layouts(2, "none"), *llama_layouts(2, "megatron"), *llama_layouts(4, "none")),
    "gpt2": (*gpt2_layouts(2, "none"), *gpt2_layouts(2, "megatron"), *gpt2_layouts(4, "none")),
}


def data(degree: int, zero: int = 0, *, replicas: int = 1, recompute: Recompute = "none") -> Strategy:
    """Plain data parallelism, sharded over all groups but for replicas."""
    shard = degree // replicas if zero else 1
    return Strategy(dp_shard=shard, dp_replicate=degree // shard, zero=zero, recompute=recompute)


def tensor(tp: int, dp: int = 1, zero: int = 0, *, cut: bool = False, recompute: Recompute = "none") -> Strategy:
    """Tensor parallelism within data parallelism."""
    base = data(dp, zero, recompute=recompute)
    return Strategy.model_validate(base.model_dump() | {"tp": tp, "sequence": "megatron" if cut else "none"})


def plan_of(name: str, strategies: Sequence[Strategy], **options: Any) -> Plan:
    """A plan of units with these strategies, for eight samples."""
    return hand_made_plan(MODELS[name](), strategies, layouts=LAYOUTS[name], **options)


def check(pool: Pool, name: str, plan: Plan) -> None:
    """Losses, gradient norms and weights of clipped steps are those of one device, on every rank."""
    ranks = pool.run(train_in_parallel, plan.num_devices, name, plan, "sgd")
    assert_equal_training(train_alone(name, "sgd", plan.training.global_batch), ranks)


FOUR, TWO, ONE = data(4), tensor(2, 2), tensor(4)

MIXED: dict[str, tuple[str, list[Strategy], dict[str, Any]]] = {
    "blocks by data, others by tensor": (
        "llama",
        [ONE, data(4, 3), data(4, 1, recompute="full"), data(4, 2, recompute="selective"), ONE],
        {"num_microbatches": 2},
    ),
    "blocks by tensor, others by data": (
        "llama",
        [FOUR, TWO, tensor(2, 2, cut=True), tensor(2, 2, 3, cut=True, recompute="full"), data(4, 1)],
        {},
    ),
    "every unit another": (
        "llama",
        [TWO, data(4, 2), tensor(2, 2, 2, cut=True), FOUR, ONE],
        {"num_microbatches": 2},
    ),
    "gpt2": ("gpt2", [TWO, data(4, 3), ONE, tensor(2, 2, 1, cut=True), TWO], {}),
    "across a border": (
        "llama",
        [TWO, tensor(2, 2, cut=True), tensor(2, 2, 2, cut=True), data(4, 3, recompute="full"), ONE],
        {"stages": (2, 3), "schedule": "1f1b", "num_microbatches": 2},
    ),
    "zero bubbles": (
        "llama",
        [tensor(2), data(2, 2), tensor(2, cut=True), data(2, 3), tensor(2)],
        {"stages": (1, 1, 1, 2), "schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
    ),
    "tied copies on one rank": (
        "gpt2",
        [data(2, 1), tensor(2), data(2, 2), tensor(2), tensor(2)],
        {"stages": (1, 1, 1, 2), "schedule": "zbv", "virtual_stages": 2, "num_microbatches": 2},
    ),
    "right at a border": (
        "llama",
        [tensor(2), tensor(2, cut=True), data(2, 2), tensor(2, cut=True), data(2)],
        {"stages": (2, 3), "schedule": "gpipe", "num_microbatches": 2},
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixed_degrees(pool: Pool, case: str) -> None:
    """Activations, masks, labels and the loss are redistributed between units, also at stage borders."""
    name, strategies, options = MIXED[case]
    check(pool, name, plan_of(name, strategies, **options))


def test_copies_of_tied_weights_with_unlike_strategies(pool: Pool) -> None:
    """Copies of a tied weight on two stages have strategies of their own."""
    strategies = [tensor(2), data(2, 3), data(2, 2), tensor(2), data(2, 2)]
    plan = plan_of("gpt2", strategies, stages=(3, 2), schedule="1f1b", num_microbatches=2)
    check(pool, "gpt2", plan)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding(pool: Pool, zero: int) -> None:
    """Shards within pairs of ranks and replicas across them: gradients, their norm and the update are right."""
    strategies = [data(4, zero, replicas=2)] * 3 + [data(4, zero), data(4, zero, replicas=2)]
    check(pool, "llama", plan_of("llama", strategies, num_microbatches=2))


def states_of_hybrid_sharding(plan: Plan) -> tuple[set[tuple[int, int]], bool]:
    """Elements of each weight and of its optimizer state on this rank, and whether gradients have the same cut."""
    module = parallelize_tiny(MODELS["llama"](), plan)
    update = module.optimizer("adamw", lr=1e-3)
    module.train_step(module.shard_batch(random_batch(8, 0)))
    update.step()
    sizes, alike = set(), True
    for parameter in module.parameters():
        state = update.state[parameter]["exp_avg"]
        assert isinstance(parameter, DTensor) and isinstance(state, DTensor)
        sizes.add((parameter.numel() // parameter.to_local().numel(), state.numel() // state.to_local().numel()))
        alike &= parameter.grad is not None and parameter.grad.placements == parameter.placements
    return sizes, alike


def test_hybrid_sharding_holds_one_shard_of_the_state(pool: Pool) -> None:
    """Weights' masters, gradients and optimizer state are cut over the shard axis only, also at level 1."""
    plan = plan_of("llama", [data(4, 1, replicas=2)] * 5)
    assert pool.run(states_of_hybrid_sharding, WORLD, plan) == [({(2, 2)}, True)] * WORLD


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("strategies", "options", "message"),
    [
        ([TWO, FOUR, FOUR, FOUR, ONE], {}, "tied to it .transformer.wte.weight, lm_head.weight. on one stage"),
        ([TWO, FOUR, TWO, TWO, TWO], {"global_batch": 6}, "global batch 6 is not .* 4 data-parallel groups"),
        ([TWO, data(2), TWO, TWO, TWO], {}, "unit block1: dp2 covers 2 devices of 4"),
    ],
    ids=["ties", "samples", "devices"],
)
def test_what_cannot_stand_side_by_side_is_refused(
    strategies: list[Strategy], options: dict[str, Any], message: str
) -> None:
    """A plan says which of its units do not go together, and why."""
    with pytest.raises(ValueError, match=message):
        plan_of("gpt2", strategies, **options)
