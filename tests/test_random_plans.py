"""Plans drawn at random from the space of strategies, each unit its own, train like one device."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

import galv
from galv.planner.plan import Plan, Strategy, TensorParallelLayout, Unit
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, random_batch
from tests.test_equality import GLOBAL_BATCH, check

NUM_PLANS = 12
WORLD = 4


@lru_cache
def layouts_of(model: str) -> dict[tuple[str, int, str], TensorParallelLayout]:
    """The placements that the planner finds for the model's unit classes, by class, degree and sequence mode."""
    graph = galv.capture(MODELS[model](), random_batch(2, 0), seq_len=SEQ_LEN, precision="fp32", device_kind="cpu")
    found = {
        (name, degree, sequence): graph.source.layout(name, degree, sequence)
        for name in graph.classes
        for degree in (2, 4)
        for sequence in ("none", "megatron")
    }
    return {key: layout for key, layout in found.items() if isinstance(layout, TensorParallelLayout)}


def random_plan(model: str, seed: int) -> Plan:
    """A plan on four ranks whose units have strategies drawn independently of one another."""
    draw = random.Random(seed)
    pp = draw.choice([1, 1, 2])
    num_microbatches = draw.choice([1, 2])
    plan = galv.estimate(
        MODELS[model](),
        random_batch(2, 0),
        cluster=f"cpu:{WORLD}x1",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        pp=pp,
        schedule=draw.choice(["gpipe", "1f1b"]) if pp > 1 else None,
        micro_batch=GLOBAL_BATCH // (num_microbatches * (WORLD // pp)),
    )
    stages = []
    for stage in plan.stages:
        units = [_with_strategy(unit, model, WORLD // pp, draw) for unit in stage.units]
        if pp == 1 and model == "gpt2":  # what is tied within a stage is cut alike
            units[-1] = units[-1].model_copy(update={"strategy": units[0].strategy})
        stages.append(stage.model_copy(update={"units": tuple(units)}))
    keys = {
        (unit.unit_class, unit.strategy.tp, unit.strategy.sequence)
        for stage in stages
        for unit in stage.units
        if unit.strategy.tp > 1
    }
    layouts = tuple(layouts_of(model)[key] for key in sorted(keys))
    return Plan.model_validate(plan.model_copy(update={"stages": tuple(stages), "layouts": layouts}).model_dump())


def _with_strategy(unit: Unit, model: str, num_devices: int, draw: random.Random) -> Unit:
    degrees = [tp for tp in (1, 2, 4) if tp == 1 or (unit.unit_class, tp, "none") in layouts_of(model)]
    tp = draw.choice([tp for tp in degrees if num_devices % tp == 0])
    dp, zero = num_devices // tp, draw.randrange(4)
    shard = draw.choice([n for n in (1, 2, 4) if dp % n == 0]) if zero else 1
    can_cut = unit.is_block and (unit.unit_class, tp, "megatron") in layouts_of(model)
    strategy = Strategy(
        tp=tp,
        sequence=draw.choice(["none", "megatron"]) if can_cut else "none",
        dp_shard=shard,
        dp_replicate=dp // shard,
        zero=zero,
        recompute=draw.choice(["none", "selective", "full"]) if unit.can_recompute else "none",
    )
    return unit.model_copy(update={"strategy": strategy})


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_random_plans_equal_one_device(pool: Pool, seed: int) -> None:
    """Losses of clipped steps and all weights are those of one device, whatever stands side by side."""
    model = ("llama", "gpt2")[seed % 2]
    plan = random_plan(model, seed)
    assert str(plan)
    check(pool, model, plan, "sgd")
