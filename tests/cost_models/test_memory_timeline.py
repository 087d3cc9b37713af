"""Memory over a step: the peak is the timeline's maximum, and what a search adds up bounds it closely."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galv.cost_models.data_parallel import Sharing
from galv.cost_models.memory_timeline import memory_peak, memory_timeline, summed_peak
from galv.cost_models.pipeline import num_in_flight
from galv.cost_models.strategies import Row, class_costs
from galv.cost_models.unit import Degrees, FactsPricer, Outer, UnitCost
from galv.planner.plan import Pipeline, Recompute, ScheduleName
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder

CLUSTER = load_cluster("h100-sxm-80:8x1")
LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


def blocks(levels: list[Recompute], zero: int = 3, num_microbatches: int = 8) -> list[UnitCost]:
    """The costs of a stage of large blocks that recompute so."""
    shared = FactsPricer(decoder(hidden=4096, seq_len=4096), CLUSTER)
    row = Row(Degrees(), Sharing(8, 1, zero) if zero else Sharing(1, 8, 0))
    outer = Outer(1, num_microbatches, 64 * num_microbatches, "bf16", "adamw")
    found = class_costs(shared, "Block", outer, [row], LEVELS)
    return [found.cost(0, LEVELS.index(level)) for level in levels]


Place = tuple[ScheduleName, int, int, int]
places: st.SearchStrategy[Place] = st.one_of(
    st.tuples(st.just("none"), st.just(0), st.just(1), st.integers(1, 9)),
    st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(0, 3), st.just(4), st.integers(1, 24)),
).map(lambda place: cast("Place", place))


@settings(max_examples=40, deadline=None)
@given(places, st.integers(0, 3), st.lists(st.sampled_from(LEVELS), min_size=1, max_size=5))
def test_the_peak_is_the_maximum_of_the_timeline(place: Place, zero: int, levels: list[Recompute]) -> None:
    """Found without looking at every moment; and the search's sum never falls below it."""
    schedule, stage, num_stages, rounds = place
    costs, pipeline = blocks(levels, zero, rounds), Pipeline(degree=num_stages, schedule=schedule)
    timeline = memory_timeline([costs], pipeline, stage, rounds)
    peak = memory_peak([costs], pipeline, stage, rounds)

    assert peak.total_bytes == max(point.total_bytes for point in timeline)
    bound = summed_peak(costs, num_in_flight(schedule, stage, num_stages, rounds))
    assert bound.total_bytes >= peak.total_bytes * (1 - 1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [("none", 0, 1, 4), ("1f1b", 0, 4, 16), ("1f1b", 2, 4, 16), ("1f1b", 3, 4, 4)])
def test_the_sum_of_a_search_is_close_to_the_peak_of_equal_units(zero: int, place: Place) -> None:
    """All that is given away where blocks are alike is the reduction of a block after the last."""
    schedule, stage, num_stages, rounds = place
    costs = blocks(["none"] * 4, zero, rounds)
    peak = memory_peak([costs], Pipeline(degree=num_stages, schedule=schedule), stage, rounds)
    bound = summed_peak(costs, num_in_flight(schedule, stage, num_stages, rounds))

    parts = costs[0].working
    assert parts is not None
    assert peak.total_bytes <= bound.total_bytes <= peak.total_bytes + parts.passing.input_bytes


def test_activations_rise_forward_and_fall_backward() -> None:
    """One microbatch at a time on one stage: up unit by unit, down again, and nothing is left for the update."""
    timeline = memory_timeline([blocks(["none"] * 3)], Pipeline(), 0, 2)
    kept = [point.activations_bytes for point in timeline]
    each = kept[0]

    assert kept == pytest.approx([each * n for n in [1, 2, 3, 3, 2, 1] * 2 + [0]])


def test_gradients_form_in_the_first_backward() -> None:
    """None before; then those of the units whose backward is over; all from there on."""
    timeline = memory_timeline([blocks(["none"] * 2, zero=0)], Pipeline(), 0, 2)
    gradients = [point.gradients_bytes for point in timeline]
    each = gradients[3]

    assert gradients == pytest.approx([each * n for n in [0, 0, 0, 1, 2, 2, 2, 2, 2]])


def test_gpipe_is_fullest_when_the_last_forward_ends() -> None:
    """All microbatches are in flight before the first backward."""
    peak = memory_peak([blocks(["none"] * 2)], Pipeline(degree=4, schedule="gpipe"), 1, 8)

    assert (peak.kind, peak.unit, peak.microbatch) == ("backward", 1, 0)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]),
    st.integers(0, 2),
    st.integers(1, 30),
)
def test_the_peak_under_any_schedule(schedule: tuple[ScheduleName, int], rank: int, rounds: int) -> None:
    """With several stages of unlike units on a rank, and weight gradients that are put off."""
    name, chunks = schedule
    pipeline = Pipeline(degree=3, schedule=name, virtual_stages=chunks)
    rounds = 3 * rounds if name == "interleaved" else rounds + 2
    stages = [blocks([level] * 2, 1, rounds) for level in LEVELS[:chunks]]
    stages = [[replace(cost, factor_bytes=cost.activation_bytes / 3) for cost in stage] for stage in stages]

    peak = memory_peak(stages, pipeline, rank, rounds)
    assert peak.total_bytes == max(p.total_bytes for p in memory_timeline(stages, pipeline, rank, rounds))
