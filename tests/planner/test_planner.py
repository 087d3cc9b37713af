"""The outer loop on a made-up decoder: what the best plan must be, and what nothing may make worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galv.cost_models.unit import FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import assemble
from galv.planner.by_hand import Layout, priced_by_hand
from galv.planner.graph import Edge, ModelGraph
from galv.planner.habits import alternatives
from galv.planner.plan import Plan
from galv.planner.planner import best_plan
from galv.planner.space import Features, Request, candidates, divisors
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder

GIB = 2**30


def request(global_batch: int = 32, memory: float = 79.0) -> Request:
    return Request(
        global_batch=global_batch, seq_len=1024, precision="bf16", optimizer="adamw", budget_bytes=int(memory * GIB)
    )


def planned(graph: ModelGraph, spec: str, wanted: Request) -> Plan:
    shared = FactsPricer(graph, load_cluster(spec))
    answer = best_plan(shared, candidates(graph, shared.cluster, wanted), wanted.budget_bytes)
    return assemble(
        answer.priced, answer.solution, wanted, source=None, inputs_source=None, alternatives=(), search=answer.report
    )


def by_hand(graph: ModelGraph, spec: str, wanted: Request, **sizes: object) -> Plan:
    shared = FactsPricer(graph, load_cluster(spec))
    given_sizes = {
        "tp": 1,
        "pp": 1,
        "zero": 0,
        "micro_batch": 1,
        "sequence": None,
        "recompute": "none",
        "schedule": None,
    }
    layout = Layout(**(given_sizes | sizes))  # type: ignore[arg-type]
    layout.check(shared.cluster, wanted)
    return priced_by_hand(shared, layout, wanted, source=None, inputs_source=None)


def test_a_small_model_runs_data_parallel_without_recomputation() -> None:
    """Where everything fits, memory is not paid for with time: no recomputation, no ZeRO-3, no pipeline."""
    plan = planned(decoder(), "h100-sxm-80:8x1", request())

    assert plan.pipeline.degree == 1
    assert plan.search is not None
    assert plan.search.gap < 0.1  # bounds of several chunks a rank are loose
    shared = FactsPricer(decoder(), load_cluster("h100-sxm-80:8x1"))
    plain = candidates(shared.graph, shared.cluster, request(), Features())
    assert best_plan(shared, plain, request().budget_bytes).report.proven_optimal
    assert {unit.strategy.recompute for unit in plan.units()} == {"none"}
    assert all(unit.strategy.zero < 3 for unit in plan.units())


@settings(max_examples=12, deadline=None)
@given(st.floats(6, 60), st.floats(0, 20))
def test_more_memory_never_makes_the_best_plan_slower(memory: float, extra: float) -> None:
    """The step time is non-increasing in the budget."""
    graph = decoder(num_layers=6, hidden=2048)
    try:
        before = planned(graph, "h100-sxm-80:4x1", request(16, memory))
    except NoFeasiblePlan:
        return
    after = planned(graph, "h100-sxm-80:4x1", request(16, min(memory + extra, 79)))

    assert after.estimate.step_seconds <= before.estimate.step_seconds * (1 + 2e-3)


def test_memory_pressure_is_met_unit_by_unit() -> None:
    """Between a budget where nothing is recomputed and one where all is, some blocks are recomputed and others not."""
    graph, mixed = decoder(num_layers=12, hidden=2048), 0
    for memory in (14, 14.5, 15, 15.5, 16, 20):
        try:
            plan = planned(graph, "h100-sxm-80:1x1", request(2, memory))
        except NoFeasiblePlan:
            continue
        mixed += len({unit.strategy for unit in plan.units() if unit.unit_class == "Block"}) > 1
        assert plan.estimate.fits
        assert max(plan.estimate.peak_bytes) <= memory * GIB

    assert mixed


def test_infeasible_names_a_budget_that_works_and_is_the_smallest() -> None:
    """The budget in the error fits a plan; a hundredth less does not."""
    graph = decoder(num_layers=8, hidden=4096)
    with pytest.raises(NoFeasiblePlan) as caught:
        planned(graph, "h100-sxm-80:2x1", request(4, 3.0))
    smallest = caught.value.smallest_budget_bytes
    assert smallest is not None

    planned(graph, "h100-sxm-80:2x1", request(4, (smallest + 4096) / GIB))
    with pytest.raises(NoFeasiblePlan):
        planned(graph, "h100-sxm-80:2x1", request(4, smallest * 0.99 / GIB))
    assert "GiB" in str(caught.value)
    assert any("stage" in cause for cause in caught.value.causes)


def test_the_best_plan_beats_every_layout_given_by_hand() -> None:
    """No uniform layout of the space that fits is faster than the plan."""
    graph, wanted = decoder(num_layers=6, hidden=2048), request(16, 30)
    best = planned(graph, "h100-sxm-80:4x1", wanted).estimate.step_seconds
    seen = 0
    for tp in (1, 2, 4):
        for pp in divisors(4 // tp):
            for micro_batch in divisors(16 // (4 // (tp * pp))):
                for zero in (0,) if tp * pp == 4 else (0, 1, 2, 3):
                    for recompute in ("none", "selective", "full"):
                        found = by_hand(
                            graph,
                            "h100-sxm-80:4x1",
                            wanted,
                            tp=tp,
                            pp=pp,
                            zero=zero,
                            micro_batch=micro_batch,
                            recompute=recompute,
                        )
                        if found.estimate.fits:
                            seen += 1
                            assert best <= found.estimate.step_seconds * (1 + 1e-3)
    assert seen > 20


def test_tied_units_share_their_zero_level() -> None:
    """Embedding and head of a tied model are sharded alike, and on one stage the table is held once."""
    tied = planned(decoder(tied=True), "h100-sxm-80:4x1", request())
    levels = {unit.strategy.zero for unit in tied.units() if unit.name in ("embedding", "head")}

    assert len(levels) == 1
    one = by_hand(decoder(tied=True), "h100-sxm-80:4x1", request()).estimate.stages[0].memory.parameters_bytes
    two = by_hand(decoder(tied=False), "h100-sxm-80:4x1", request()).estimate.stages[0].memory.parameters_bytes
    assert two - one == pytest.approx(32000 * 1024 * 6, rel=0.01)


def test_tensor_degrees_that_the_heads_refuse_are_left_out() -> None:
    """A degree that does not divide the heads is never planned, and by hand it is refused with the reason."""
    graph = decoder(num_heads=6)
    assert all(unit.strategy.tp in (1, 2) for unit in planned(graph, "h100-sxm-80:8x1", request(8, 20)).units())

    with pytest.raises(UsageError, match="6 heads do not divide by 4"):
        by_hand(graph, "h100-sxm-80:8x1", request(), tp=4)


def test_skips_are_not_sequence_sharded() -> None:
    """Where an activation goes past its neighbour, tensor parallelism keeps activations whole and says why."""
    skipping = replace(decoder(), edges=(Edge(1, (2, 4), 1024.0),))

    layouts = {u.strategy.sequence for u in by_hand(skipping, "h100-sxm-80:8x1", request(), tp=2).units()}
    assert layouts == {"none"}
    with pytest.raises(UsageError, match=r"layers.0 also feeds layers.3, past its neighbour"):
        by_hand(skipping, "h100-sxm-80:8x1", request(), tp=2, sequence="megatron")


def test_time_parts_sum_to_the_step_and_bytes_to_the_peak() -> None:
    """The printed parts of every stage add up to the step and to its peak."""
    plan = by_hand(decoder(), "h100-sxm-80:8x1", request(), pp=4, micro_batch=2)

    for stage, peak in zip(plan.estimate.stages, plan.estimate.peak_bytes, strict=True):
        assert stage.time.total_seconds == pytest.approx(plan.estimate.step_seconds)
        assert stage.memory.total_bytes == peak


def test_habits_are_priced_or_say_why_not() -> None:
    """Every habitual layout has a step time or a reason, and none beats the plan."""
    graph, wanted = decoder(num_layers=6, hidden=2048), request(16, 30)
    shared = FactsPricer(graph, load_cluster("h100-sxm-80:4x1"))
    best = planned(graph, "h100-sxm-80:4x1", wanted).estimate.step_seconds

    rows = alternatives(shared, wanted)
    assert len(rows) == 4
    for row in rows:
        assert row.step_seconds is None or row.step_seconds >= best * (1 - 1e-3)
        assert row.step_seconds is not None or row.reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "does not divide the 8 devices"),
        ({"micro_batch": 5}, "is not a multiple of 8 data-parallel groups x micro batch 5; 40 would be"),
        ({"tp": 8, "zero": 1}, "leaves only one"),
        ({"zero": 4}, "0, 1, 2 or 3"),
        ({"pp": 0}, "at least 1"),
        ({"pp": 2, "schedule": "none"}, "needs a schedule"),
        ({"schedule": "gpipe"}, "is for a pipeline"),
        ({"sequence": "megatron"}, "needs tp > 1"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(sizes: dict[str, object], message: str) -> None:
    """A layout by hand that does not divide names what was given and what would work."""
    with pytest.raises(UsageError, match=message):
        by_hand(decoder(), "h100-sxm-80:8x1", request(), **sizes)


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    """A global batch that suits no number of groups says which multiples would."""
    graph = decoder(num_layers=1, num_heads=1)
    with pytest.raises(UsageError, match="multiple of"):
        candidates(graph, load_cluster("h100-sxm-80:1x7"), request(3))


def test_without_time_a_plan_is_found_with_its_gap() -> None:
    """Pricing watches the clock as well: what was not priced is open, and the plan says so."""
    graph, wanted = decoder(num_layers=16), request()
    shared = FactsPricer(graph, load_cluster("h100-sxm-80:8x2"))
    answer = best_plan(shared, candidates(graph, shared.cluster, wanted), wanted.budget_bytes, time_limit_seconds=0.0)

    assert answer.report.is_time_limited
    assert 0 < answer.report.gap < 1
    assert not answer.report.proven_optimal
