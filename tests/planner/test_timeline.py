"""Timelines of plans: the step that the estimate gives, and what other schedules would do with the same stages."""

from __future__ import annotations

import json

import pytest

import galv
from galv.cost_models.schedules import bubble_seconds, chrome_trace, makespan_seconds
from galv.planner.plan import Plan
from galv.planner.timeline import timeline
from galv.profiles.cluster import load_cluster


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four stages of a small decoder."""
    transformers = pytest.importorskip("transformers")
    from galv.planner.capture.huggingface import builder

    config = transformers.GPT2Config(n_embd=256, n_layer=8, n_head=4, vocab_size=1000, n_positions=256)
    cluster = load_cluster("a100-sxm-80:4x1")
    return galv.estimate(builder(config), cluster=cluster, seq_len=256, global_batch=16, pp=4)


def test_the_timeline_is_the_estimate(plan: Plan) -> None:
    """Simulated operation by operation, the step takes what the estimate says, or less: its last work may overlap."""
    total = makespan_seconds(timeline(plan))
    last = max(stage.step_seconds for stage in plan.estimate.stages)

    assert plan.estimate.step_seconds - last <= total <= plan.estimate.step_seconds * (1 + 1e-9)


def test_other_schedules_can_be_asked_for(plan: Plan) -> None:
    """Interleaving and a split backward wait less than 1F1B with the same stages; GPipe does not."""
    idle = {
        name: sum(map(sum, bubble_seconds(timeline(plan, name), 4)))
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
    }

    assert idle["zb-h1"] < idle["1f1b"]
    assert idle["interleaved"] < idle["1f1b"] * 1.01
    assert idle["gpipe"] >= idle["1f1b"] * 0.99
    assert json.loads(chrome_trace(timeline(plan, "zbv")))["traceEvents"]


def test_an_unknown_schedule_is_answered_with_the_known_ones(plan: Plan) -> None:
    """The error lists the names."""
    with pytest.raises(galv.UnknownName, match="zb-h1"):
        timeline(plan, "zb-h2")
