"""ZeRO levels do what their definition says, when it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from galv.planner.plan import Plan, Precision, Strategy, Unit
from galv.runtime.data_parallel import grouped, owns, uses_ddp, uses_fsdp
from galv.runtime.loss import loss_of
from galv.runtime.parallelize import parallelize
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, random_batch
from tests.runtime.test_parallelize import strategy

NUM_MICROBATCHES = 3
UNITS = 5
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside it, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step_collectives(plan: Plan) -> dict[str, int]:
    """How often each collective ran in the second step."""
    module = parallelize(MODELS["llama"](), plan)
    for step in range(2):
        with Collectives() as seen:
            loss = module.train_step(module.shard_batch(random_batch(plan.training.global_batch, step)))
        assert loss.isfinite()
    seen.counts[REDUCE] -= 2  # the number of valid targets, and the loss
    return {name: count for name, count in seen.counts.items() if count}


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ({"dp": 2, "zero": 0}, {REDUCE: UNITS}),
        ({"dp": 2, "zero": 1}, {GATHER: UNITS, SCATTER: UNITS}),
        ({"dp": 2, "zero": 2}, {GATHER: UNITS, SCATTER: UNITS * NUM_MICROBATCHES}),
        ({"dp": 2, "zero": 3}, {GATHER: 2 * UNITS * NUM_MICROBATCHES, SCATTER: UNITS * NUM_MICROBATCHES}),
        (
            {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
            {GATHER: UNITS, SCATTER: UNITS * NUM_MICROBATCHES, REDUCE: UNITS},
        ),
    ],
    ids=str,
)
def test_collectives_of_a_step(pool: Pool, level: dict[str, int], expected: dict[str, int]) -> None:
    """Parameters are gathered and gradients reduced once a step or once a microbatch, as the level says."""
    # Mixed with a unit that shards, so that zero 0 runs beside the others and not under DDP.
    plan = hand_made_plan(MODELS["llama"](), strategy(**level), num_microbatches=NUM_MICROBATCHES, global_batch=12)
    if level.get("zero") == 0:
        plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "bf16"})})

    for counts in pool.run(step_collectives, plan.num_devices, plan):
        assert counts == expected


# ----------------------------------------------------------------------------------------------- which groups


def units_named(*names: tuple[str, ...]) -> list[Unit]:
    """Units that own the modules of those names, with ascending ZeRO levels."""
    return [
        Unit(name=f"u{i}", unit_class="u", modules=modules, strategy=strategy(dp=2, zero=i))
        for i, modules in enumerate(names)
    ]


def test_tied_units_form_one_group() -> None:
    """Units that share a tensor are sharded together, by the highest level among them."""
    units = units_named(("wte",), ("h.0",), ("head",))

    groups = grouped(units, [("wte.weight", "head.weight")])

    assert [[unit.name for unit in group.units] for group in groups] == [["u0", "u2"], ["u1"]]
    assert groups[0].zero == 2


def test_a_unit_that_holds_the_root_comes_last() -> None:
    """Modules inside of others are sharded before them."""
    units = units_named(("",), ("h.0",), ("h.1",))
    assert [group.units[0].name for group in grouped(units, [])] == ["u1", "u2", "u0"]


def test_ownership_is_by_whole_names() -> None:
    """A unit owns its modules and what lies within them, not what merely starts alike."""
    (unit,) = units_named(("h.1",))
    assert owns(unit, "h.1")
    assert owns(unit, "h.1.mlp.weight")
    assert not owns(unit, "h.10.mlp.weight")


@pytest.mark.parametrize(
    ("strategies", "precision", "ddp", "fsdp"),
    [
        (strategy(), "fp32", False, False),
        (strategy(), "bf16", False, True),
        (strategy(tp=2), "fp32", False, False),
        (strategy(dp=2), "fp32", True, False),
        (strategy(dp=2), "bf16", False, True),
        ([strategy(dp=2)] * 4 + [strategy(dp=2, zero=1)], "fp32", False, True),
    ],
)
def test_which_mechanism_runs_a_plan(
    strategies: Strategy | list[Strategy], precision: Precision, ddp: bool, fsdp: bool
) -> None:
    """DDP runs what neither shards nor casts; one device in fp32 needs nothing."""
    plan = hand_made_plan(MODELS["llama"](), [strategy()] * UNITS)
    each = strategies if isinstance(strategies, list) else [strategies] * UNITS
    units = tuple(unit.model_copy(update={"strategy": s}) for unit, s in zip(plan.units(), each, strict=True))
    stage = plan.stages[0].model_copy(update={"units": units})
    training = plan.training.model_copy(update={"precision": precision})
    plan = plan.model_copy(update={"stages": (stage,), "training": training})

    assert uses_ddp(plan) == ddp
    assert any(uses_fsdp(plan, unit) for unit in units) == fsdp


# ----------------------------------------------------------------------------------------------- a loop of one's own


def own_loop(plan: Plan, accumulate: bool) -> dict[str, Tensor]:
    """Weights after one step of a user's own loop over two microbatches."""
    module = parallelize(MODELS["llama"](), plan)
    update = module.optimizer("sgd", lr=0.1)
    first, second = (module.shard_batch(random_batch(8, seed)) for seed in (0, 1))
    if accumulate:
        with module.no_sync():
            loss_of(module(**first)).backward()
        loss_of(module(**second)).backward()
    else:
        (loss_of(module(**first)) + loss_of(module(**second))).backward()
    update.step()
    with torch.no_grad():
        assert loss_of(module(**second)).isfinite()
    return module.full_state_dict()


def own_loop_alone() -> dict[str, Tensor]:
    """The same with one process, where each half of the batch stands for one rank."""
    model = MODELS["llama"]()
    for seed in (0, 1):
        batch = random_batch(8, seed)
        for half in (slice(0, 4), slice(4, 8)):
            (loss_of(model(**{name: value[half] for name, value in batch.items()})) / 2).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    return model.state_dict()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_own_loops_average_gradients(pool: Pool, zero: int, accumulate: bool) -> None:
    """Called like the model it was made of, gradients are averaged over the ranks, with `no_sync` or without."""
    plan = hand_made_plan(MODELS["llama"](), strategy(dp=2, zero=zero))
    torch.testing.assert_close(pool.run(own_loop, 2, plan, accumulate)[0], own_loop_alone(), rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------- precision


def low_precision_losses(plan: Plan) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Losses of a few steps, and the types of parameters and of what blocks give."""
    module = parallelize(MODELS["llama"](), plan)
    given: set[torch.dtype] = set()
    block = module.model.get_submodule("model.layers.0")
    block.register_forward_hook(lambda module, args, output: given.add(output.dtype))
    update = module.optimizer("adamw", lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(float(module.train_step(module.shard_batch(random_batch(8, 0)))))
        module.clip_grad_norm_(1.0)
        update.step()
        update.zero_grad()
    return losses, {parameter.dtype for parameter in module.parameters()}, given


def single_precision_losses() -> list[float]:
    """The same steps in one process, in fp32."""
    model, losses = MODELS["llama"](), []
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = loss_of(model(**random_batch(8, 0)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_low_precision_computes_and_single_precision_updates(pool: Pool, precision: Precision, zero: int) -> None:
    """Blocks compute in the plan's precision over fp32 parameters, and the loss falls as it does in fp32."""
    plan = hand_made_plan(MODELS["llama"](), strategy(dp=2, zero=zero), num_microbatches=2)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": precision})})

    losses, stored, given = pool.run(low_precision_losses, 2, plan)[0]

    assert stored == {torch.float32}
    assert given == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert losses == pytest.approx(single_precision_losses(), abs=0.02)
