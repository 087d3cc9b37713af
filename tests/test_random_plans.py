"""Plans drawn at random from the space of strategies train like one device: a sample of `benchmarks/fuzz.py`."""

from __future__ import annotations

import pytest

from tests.distributed_pool import Pool
from tests.random_plans import FAMILIES, difference, draw_plan, features_of, planned, train_in_parallel

WORLD = 4
SAMPLE = [*((family, seed) for seed, family in enumerate(FAMILIES)), ("t5", 100)]


@pytest.mark.parametrize(("family", "seed"), SAMPLE)
def test_random_plans_equal_one_device(pool: Pool, family: str, seed: int) -> None:
    """Losses of clipped steps and all weights are those of one device, whatever stands side by side."""
    plan = draw_plan(family, WORLD, seed).plan
    ranks = pool.run(train_in_parallel, WORLD, family, plan.to_json())
    assert difference(family, plan, ranks) is None


def test_planned_plans_equal_one_device(pool: Pool) -> None:
    """What the search answers is among what runs."""
    plan = planned("mixtral", 2)
    ranks = pool.run(train_in_parallel, 2, "mixtral", plan.to_json())
    assert difference("mixtral", plan, ranks) is None


def test_draws_reach_all_of_the_space() -> None:
    """Few draws have every schedule, layout, level and mixture, and are the same every time."""
    numbers = {"t5": 20, "gpt2": 40, "mixtral": 15}
    plans = [draw_plan(family, WORLD, seed).plan for family, number in numbers.items() for seed in range(number)]
    seen = {feature for plan in plans for feature in features_of(plan)}

    expected = {"one stage", "gpipe", "1f1b", "interleaved x2", "interleaved x3", "zb-h1", "zbv x2", "tp x cp"}
    expected |= {
        "tp",
        "tp + sequence",
        "ulysses",
        "ring",
        "ep",
        "hybrid sharding",
        "zero 0",
        "zero 1",
        "zero 2",
        "zero 3",
    }
    expected |= {"selective recompute", "full recompute", "units of different tp", "units of different dp"}
    expected |= {"microbatches no multiple of pp", "tied across stages"}
    expected |= {"activations offloaded", "optimizer offloaded", "parameters offloaded"}
    assert seen == expected
    assert draw_plan("t5", WORLD, 0).plan == plans[0]
