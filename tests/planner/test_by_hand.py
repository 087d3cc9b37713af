"""Layouts given by hand: any degree that exists is priced, what makes no sense is refused, cuts are balanced."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.unit import FactsPricer
from galv.errors import UsageError
from galv.planner.balance import filled, least_largest_sum
from galv.planner.by_hand import Layout, priced_by_hand, staged_by_hand
from galv.planner.graph import ModelGraph
from galv.planner.plan import Estimate, Strategy
from galv.planner.space import EVERYTHING, Features, Request
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder
from tests.planner.test_planner import by_hand, request

DEFAULTS: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "zero": 0,
    "micro_batch": 1,
    "sequence": None,
    "recompute": "none",
    "schedule": None,
}


def priced(
    graph: ModelGraph, spec: str = "h100-sxm-80:8x1", wanted: Request | None = None, **sizes: Any
) -> tuple[dict[str, Strategy], Estimate]:
    """(the strategy of each unit, the estimate) of a layout that need not run."""
    shared, wanted = FactsPricer(graph, load_cluster(spec)), wanted or request()
    layout = Layout(**(DEFAULTS | sizes))
    layout.check(shared.cluster, wanted, EVERYTHING)
    _, stages, found = staged_by_hand(shared, layout, wanted)
    return {ref.name: cost.strategy for stage in stages for ref, cost in stage}, found


def test_blocks_get_the_context_axis_and_the_ends_other_samples() -> None:
    """cp 2 of 8 devices: blocks have 4 data ranks, embedding and head 8."""
    units, found = priced(decoder(attention=True), cp=2, sequence="ulysses", micro_batch=2, zero=1)

    assert units["layers.0"] == Strategy(cp=2, sequence="ulysses", dp_shard=4, zero=1)
    assert units["embedding"] == units["head"] == Strategy(dp_shard=8, zero=1)
    assert found.step_seconds > 0


def test_where_samples_are_few_the_ends_get_a_tensor_axis() -> None:
    """One sample on eight context ranks: its head is divided by vocabulary."""
    units, _ = priced(decoder(attention=True), cp=8, sequence="ring")

    assert units["head"] == Strategy(tp=8)
    assert units["layers.0"] == Strategy(cp=8, sequence="ring")


def test_a_context_axis_halves_what_blocks_keep() -> None:
    """The same samples on twice the ranks: half the activations of the blocks."""
    graph = decoder(attention=True, seq_len=8192)
    _, whole = priced(graph, "h100-sxm-80:4x1", micro_batch=2)
    _, halved = priced(graph, "h100-sxm-80:8x1", micro_batch=2, cp=2, sequence="ulysses")
    block = [found.stages[0].units[1] for found in (whole, halved)]

    assert block[1].activations_bytes == block[0].activations_bytes / 2
    assert block[1].compute_seconds == pytest.approx(block[0].compute_seconds / 2, rel=0.05)


def test_shards_and_replicas_as_stated() -> None:
    """Either degree alone decides the other."""
    for sizes in ({"dp_shard": 4}, {"dp_replicate": 2}, {"dp_shard": 4, "dp_replicate": 2}):
        units, _ = priced(decoder(), zero=3, **sizes)
        assert units["layers.3"] == Strategy(dp_shard=4, dp_replicate=2, zero=3)


def test_experts_only_where_there_are_some() -> None:
    """ep shares out the experts of the blocks; the ends are data-parallel."""
    units, _ = priced(decoder(experts=8), ep=4, zero=2)

    assert (units["layers.0"].ep, units["head"].ep) == (4, 1)


def test_offload_takes_bytes_from_the_device() -> None:
    """And costs time."""
    _, here = priced(decoder(hidden=4096), zero=3)
    _, there = priced(decoder(hidden=4096), zero=3, offload=("activations", "optimizer"))

    assert there.peak_bytes[0] < here.peak_bytes[0]
    assert there.step_seconds > here.step_seconds


def test_every_schedule_is_priced() -> None:
    """More chunks and split backwards leave less bubble than 1F1B; each rank has a peak of its own."""
    graph = decoder(num_layers=16, hidden=2048)
    plain, gpipe, interleaved, split, v_shaped = (
        priced(graph, pp=4, **sizes)[1]
        for sizes in (
            {},
            {"schedule": "gpipe"},
            {"virtual_stages": 2},
            {"schedule": "zb-h1"},
            {"schedule": "zbv", "virtual_stages": 2},
        )
    )

    assert interleaved.step_seconds < plain.step_seconds
    assert split.step_seconds < plain.step_seconds
    assert min(gpipe.peak_bytes) > max(plain.peak_bytes)
    assert [len(found.stages) for found in (interleaved, v_shaped)] == [4, 4]
    assert sum(len(stage.units) for stage in v_shaped.stages) == 18


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"cp": 2}, "ulysses or ring"),
        ({"sequence": "ring"}, "cp > 1"),
        ({"cp": 3, "sequence": "ring"}, "x cp 3 = 3 does not divide the 8 devices"),
        ({"zero": 3, "dp_shard": 3}, "is not the data-parallel degree, 8"),
        ({"dp_shard": 4}, "shards nothing at zero 0"),
        ({"ep": 3}, "ep 3 must divide the 8 data-parallel ranks"),
        ({"zero": 2, "offload": ("parameters",)}, "needs zero 3"),
        ({"virtual_stages": 2}, "only the schedules interleaved and zbv"),
        ({"pp": 2, "schedule": "interleaved"}, "virtual_stages of 2 or more"),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 3}, "virtual_stages 2, not 3"),
        ({"cp": 0}, "cp must be at least 1"),
        ({"ep": 5}, "does not divide|must divide"),
    ],
)
def test_what_makes_no_sense_is_refused(sizes: dict[str, Any], message: str) -> None:
    """In a sentence that says what would."""
    with pytest.raises(UsageError, match=message):
        priced(decoder(attention=True), **sizes)


def test_what_the_runtime_does_not_run_is_refused() -> None:
    """Unless its feature is there."""
    layout = Layout(**(DEFAULTS | {"offload": ("optimizer",)}))
    cluster = load_cluster("h100-sxm-80:8x1")

    with pytest.raises(UsageError, match="galv does not run offload yet"):
        layout.check(cluster, request(), Features())
    layout.check(cluster, request(), Features(offload=True))


# ----------------------------------------------------------------------------------------------- cuts


@given(st.lists(st.integers(1, 20), min_size=2, max_size=9), st.data())
def test_cuts_have_the_least_largest_part(values: list[int], data: st.DataObject) -> None:
    """As trying all cuts finds it, filled from either end, with no part empty."""
    parts = data.draw(st.integers(1, len(values)))
    cuts = ((0, *inner, len(values)) for inner in combinations(range(1, len(values)), parts - 1))
    expected = min(max(sum(values[a:b]) for a, b in pairwise(cut)) for cut in cuts)

    least = least_largest_sum(values, parts)
    assert least == pytest.approx(expected)
    cut = filled(values, parts, least)
    assert all(a < b for a, b in pairwise(cut))
    assert max(sum(values[a:b]) for a, b in pairwise(cut)) == expected


def test_thirty_blocks_on_eight_stages_are_cut_evenly() -> None:
    """Four blocks on a stage at most, however dear the ends are not."""
    plan = by_hand(decoder(num_layers=30, hidden=4096), "h100-sxm-80:8x1", request(), pp=8)
    blocks = [sum(unit.is_block for unit in stage.units) for stage in plan.stages]

    assert sorted(blocks) == [3, 3, 4, 4, 4, 4, 4, 4]


def test_an_estimate_takes_milliseconds() -> None:
    """62 blocks on 512 GPUs in 8 stages, once the model's facts are there."""
    shared = FactsPricer(decoder(num_layers=62, hidden=8192), load_cluster("h100-sxm-80:8x64"))
    wanted = Request(512, 4096, "bf16", "adamw", 79 * 2**30)
    layout = Layout(**(DEFAULTS | {"tp": 4, "pp": 8, "zero": 1}))

    def seconds() -> float:
        started = time.process_time()
        layout.check(shared.cluster, wanted)
        priced_by_hand(shared, layout, wanted, source=None, inputs_source=None)
        return time.process_time() - started

    assert min(seconds() for _ in range(10)) < 5e-3
