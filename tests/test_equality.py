"""Any layout trains like one device: losses of five steps and every updated weight, for real models, end to end."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

import galv
from galv.planner.plan import Plan, Recompute, Strategy
from galv.runtime.loss import loss_of
from galv.runtime.materialize import initialize
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, random_batch

STEPS = 5
GLOBAL_BATCH = 8
RATES = {"sgd": 0.3, "adamw": 1e-3}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
ROUNDING = {"sgd": 1e-6, "adamw": 2e-5}
"""Absolute tolerance: AdamW divides a gradient by its own size, so one of mere rounding noise moves a weight too."""
MAX_NORM = 0.5

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ddp": (2, {}),
    "zero1": (2, {"zero": 1, "micro_batch": 2}),
    "zero2": (2, {"zero": 2, "micro_batch": 2}),
    "zero3": (2, {"zero": 3, "micro_batch": 2}),
    "tp2": (2, {"tp": 2, "micro_batch": 4}),
    "tp2 without sequence": (2, {"tp": 2, "micro_batch": 4, "sequence": "none"}),
    "pp2 gpipe": (2, {"pp": 2, "schedule": "gpipe", "micro_batch": 2}),
    "pp2 1f1b": (2, {"pp": 2, "schedule": "1f1b", "micro_batch": 2}),
    "tp2 x zero3": (4, {"tp": 2, "zero": 3, "micro_batch": 2}),
    "pp2 x zero3": (4, {"pp": 2, "zero": 3, "micro_batch": 2}),
    "pp2 x tp2": (4, {"pp": 2, "tp": 2, "micro_batch": 2}),
    "mixed": (4, {"tp": 2, "zero": 1, "micro_batch": 2}),
}


def layout_plan(name: str, model: str, recompute: Recompute) -> Plan:
    """The plan of one layout for a tiny model; `mixed` gives every block another strategy."""
    world, sizes = LAYOUTS[name]
    plan = galv.estimate(
        MODELS[model](),
        random_batch(2, 0),
        cluster=f"cpu:{world}x1",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        recompute=recompute,
        **sizes,  # type: ignore[arg-type]  # each is a keyword of estimate
    )
    return _mixed(plan) if name == "mixed" else plan


def _mixed(plan: Plan) -> Plan:
    """`plan` with ZeRO 0 to 3 and all recompute levels side by side."""
    levels: list[tuple[int, Recompute]] = [(3, "full"), (0, "none"), (2, "selective")]
    units = []
    for i, unit in enumerate(plan.stages[0].units):
        zero, recompute = levels[i % 3] if unit.is_block else (1, "none")
        shard = unit.strategy.dp if zero else 1
        changes = {"zero": zero, "recompute": recompute, "dp_shard": shard, "dp_replicate": unit.strategy.dp // shard}
        strategy = Strategy.model_validate(unit.strategy.model_dump() | changes)
        units.append(unit.model_copy(update={"strategy": strategy}))
    stage = plan.stages[0].model_copy(update={"units": tuple(units)})
    return Plan.model_validate(plan.model_copy(update={"stages": (stage,)}).model_dump())


def train_parallel(model: str, text: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of a run under the plan in `text`, from a model on the meta device."""
    plan = Plan.from_json(text)
    with torch.device("meta"):
        meta = MODELS[model]()
    module = galv.parallelize(meta, plan, seed=1)
    optimizer = module.optimizer(kind, lr=RATES[kind])
    losses = []
    for step in range(STEPS):
        batch = module.shard_batch(random_batch(GLOBAL_BATCH, step))
        losses.append(float(module.train_step(batch)))
        module.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.full_state_dict()


@lru_cache
def train_alone(model: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of plain PyTorch on the whole batch, in one process."""
    with torch.device("meta"):
        alone = MODELS[model]()
    initialize(alone, seed=1)
    optimizer = OPTIMIZERS[kind](alone.parameters(), lr=RATES[kind])
    losses = []
    for step in range(STEPS):
        loss = loss_of(alone(**random_batch(GLOBAL_BATCH, step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in alone.state_dict().items()}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_equals_one_device(pool: Pool, model: str, layout: str, recompute: Recompute) -> None:
    """Losses and all weights after five clipped steps equal the single-process run, labels uneven, fp32."""
    check(pool, model, layout_plan(layout, model, recompute), "sgd")


@pytest.mark.parametrize("layout", ["ddp", "zero3", "tp2 x zero3", "pp2 x tp2", "mixed"])
def test_equals_one_device_under_adamw(pool: Pool, layout: str) -> None:
    """The same with an optimizer that keeps state."""
    check(pool, "gpt2", layout_plan(layout, "gpt2", "none"), "adamw")


def check(pool: Pool, model: str, plan: Plan, kind: str) -> None:
    """Trains under `plan` and alone, and compares every loss and weight."""
    expected_losses, expected = train_alone(model, kind)
    results = pool.run(train_parallel, plan.num_devices, model, plan.to_json(), kind)

    for losses, _ in results:
        assert losses == pytest.approx(expected_losses, rel=1e-4)
    weights = results[0][1]
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=ROUNDING[kind], msg=lambda text, n=name: f"{n}: {text}"
        )
