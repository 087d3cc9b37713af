"""What can be asked of the search beside the fastest plan, on a made-up decoder: demands, the k best, the front,
reasons, and what would make a plan fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galv.cost_models.unit import FactsPricer
from galv.errors import ModelError, NoFeasiblePlan, UsageError
from galv.planner.ask import Question, answered, best_plans, front
from galv.planner.constraints import read_constraints
from galv.planner.front import ranking
from galv.planner.planner import best_plan
from galv.planner.reporter import Reporter
from galv.planner.space import Request, candidates
from galv.planner.tables import Limits
from galv.planner.why import why
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder

GIB = 2**30
GRAPH = decoder(num_layers=6, hidden=2048)


def question(spec: str = "h100-sxm-80:4x1", memory: float = 79.0, global_batch: int = 16, **asked: object) -> Question:
    """What the tests ask, with `require` and `forbid` as texts."""
    wanted = Request(global_batch, 1024, "bf16", "adamw", int(memory * GIB))
    demands = read_constraints(asked.pop("require", ()), asked.pop("forbid", ()))  # type: ignore[arg-type]
    return Question(FactsPricer(GRAPH, load_cluster(spec)), wanted, limits=Limits(constraints=demands), **asked)  # type: ignore[arg-type]


def test_what_is_demanded_is_met_and_costs_no_less_than_freedom() -> None:
    """Each demand holds in the plan, for the units it is about; no demand makes the plan faster."""
    free = answered(question())[0].estimate.step_seconds
    for require, forbid, holds in (
        (["tp=2"], [], lambda unit, plan: unit.strategy.tp == 2),
        (["pp=2", "zero=0"], [], lambda unit, plan: plan.pipeline.degree == 2 and unit.strategy.zero == 0),
        ([], ["dp=4"], lambda unit, plan: unit.strategy.dp != 4),
        (["microbatch=1"], [], lambda unit, plan: plan.samples_at(unit.strategy.dp) == 1),
        (["recompute=full"], ["gpipe"], lambda unit, plan: unit.strategy.recompute == "full" or not unit.is_block),
        (
            ["layers.1-3:recompute=full", "head:zero=3"],
            [],
            lambda unit, plan: (
                (unit.strategy.recompute == "full" or unit.name not in ("layers.1", "layers.2", "layers.3"))
                and (unit.strategy.zero == 3 or unit.name != "head")
            ),
        ),
    ):
        plan = answered(question(require=require, forbid=forbid))[0]

        assert all(holds(unit, plan) for unit in plan.units()), (require, forbid)
        assert plan.estimate.step_seconds >= free * (1 - 1e-9)
        assert plan.search is not None
        assert plan.search.demands == (*(f"--require {d}" for d in require), *(f"--forbid {d}" for d in forbid))
        assert all(text in str(plan) for text in plan.search.demands)


def test_demands_on_some_units_leave_the_rest_their_best() -> None:
    """A demand that the best plan meets anyway changes nothing, though it splits the blocks into kinds."""
    best = answered(question(memory=14))[0]
    asked = question(memory=14, require=["layers.0-2:tp=1", "layers.4:recompute!=full"])
    unchanged = all(unit.strategy.tp == 1 for unit in best.units())
    plan = answered(asked)[0]

    assert plan.estimate.step_seconds >= best.estimate.step_seconds * (1 - 1e-9)
    assert not unchanged or plan.estimate.step_seconds <= best.estimate.step_seconds * 1.02


@pytest.mark.parametrize(
    ("require", "says"),
    [
        (["tp=3"], "--require tp=3: tp can be 1, 2, 4 here"),
        (["pp=8"], "pp can be 1, 2, 4 here"),
        (["head:recompute=full"], "recompute of head can be none here"),
        (["blocks.*:tp=2"], "no unit matches 'blocks.*'; the units are embedding, layers.0"),
        (["ep=2"], "no unit of this model has a choice of ep"),
        (["tp=4", "zero=3", "pp<=2"], "cannot be met together here: --require tp=4, --require zero=3"),
    ],
)
def test_demands_that_nothing_meets_are_named(require: list[str], says: str) -> None:
    """One error: the demand and the values that exist, or the fewest demands that contradict each other."""
    with pytest.raises(UsageError) as caught:
        answered(question(require=require))

    assert says in str(caught.value)
    assert "pp<=2" not in str(caught.value)


def test_the_k_best_differ_and_come_in_order() -> None:
    """No two are alike, each is as fast as its place says, and the first is the best plan."""
    found = answered(question(), 4)

    seconds = [plan.estimate.step_seconds for plan in found]
    assert seconds == sorted(seconds)
    assert found[0].stages == answered(question())[0].stages
    assert len({(plan.stages, plan.pipeline, plan.training.num_microbatches) for plan in found}) == 4
    table = ranking(found).splitlines()
    assert len(table) == 2 + 4
    assert f"{100 * (seconds[1] / seconds[0] - 1):+.2f} %" in table[3]


def test_by_memory_nothing_needs_less() -> None:
    """Nothing fits just below its peak; the smallest budget named does suffice, and is hardly above."""
    leanest = max(answered(question(objective="memory"))[0].estimate.peak_bytes)
    ranked = answered(question(objective="memory"), 3)

    with pytest.raises(NoFeasiblePlan) as refused:
        answered(question(memory=leanest * 0.999 / GIB))
    smallest = refused.value.smallest_budget_bytes
    assert smallest is not None
    answered(question(memory=smallest * 1.001 / GIB))
    assert leanest <= smallest < leanest * 1.05  # the search's sum of parts is a bound on the timeline's peak
    peaks = [max(plan.estimate.peak_bytes) for plan in ranked]
    assert peaks == sorted(peaks)
    assert peaks[0] == leanest


def test_by_cost_fewer_devices_may_do() -> None:
    """Device-seconds are no more than on the whole cluster or any part, and the plan is for the devices it uses."""
    best = answered(question("h100-sxm-80:2x2", objective="cost"))[0]
    costs = {
        spec: answered(question(spec))[0].estimate.step_seconds * load_cluster(spec).num_devices
        for spec in ("h100-sxm-80:1x1", "h100-sxm-80:2x1", "h100-sxm-80:2x2")
    }

    assert best.estimate.step_seconds * best.num_devices == pytest.approx(min(costs.values()))
    assert costs[best.cluster.spec] == min(costs.values())
    assert best.num_devices < 4
    assert f"{best.num_devices} of 4 devices" in str(best)


def test_the_front_holds_the_best_plan_of_each_budget() -> None:
    """Each plan fits its budget, is as fast as the search says under it, and more memory is faster."""
    found = front(question(global_batch=64), 5, Reporter())

    seconds = [point.step_seconds for point in found.points]
    assert len(seconds) > 2
    assert seconds == sorted(seconds, reverse=True)
    for plan in found.plans:
        assert plan.estimate.fits
        under = answered(question(memory=plan.cluster.memory_budget_bytes / GIB, global_batch=64))[0]
        assert plan.estimate.step_seconds == pytest.approx(under.estimate.step_seconds, rel=2e-3)
    assert len(str(found).splitlines()) == 2 + len(seconds)
    assert len(found.to_csv().splitlines()) == 1 + len(seconds)


def test_a_unit_says_why() -> None:
    """With room, time binds and another strategy costs something; short of memory, memory binds."""
    roomy = answered(question(require=["pp=1"]))[0]
    least = max(answered(question(require=["pp=1"], objective="memory"))[0].estimate.peak_bytes)
    tight = answered(question(memory=least * 1.1 / GIB, require=["pp=1"]))[0]

    free = why(roomy, question().shared, "layers.2")
    assert free.binds in ("compute", "communication")
    assert free.runner_up is not None
    assert free.runner_up != free.strategy
    assert free.step_seconds >= -1e-12

    short = why(tight, question().shared, "layers.2")
    assert short.binds == "memory"
    assert short.fastest_held_bytes > 0
    assert "memory binds: stage 0 holds" in str(short)

    with pytest.raises(UsageError, match=r"no unit 'layers.9'; its units are embedding"):
        why(roomy, question().shared, "layers.9")
    other = FactsPricer(replace(GRAPH, fingerprint="another"), load_cluster("h100-sxm-80:4x1"))
    with pytest.raises(ModelError, match="not the model"):
        why(roomy, other, "head")


def test_what_would_make_it_fit_really_does() -> None:
    """Changes in the message of an infeasible request are tried: with each of them alone there is a plan."""
    asked = question("h100-sxm-80:2x1", memory=5.0, global_batch=8, require=["recompute=none", "zero=0"])
    with pytest.raises(NoFeasiblePlan) as caught:
        best_plans(asked, 1, Reporter())
    message = str(caught.value)

    wide = replace(asked, shared=FactsPricer(GRAPH, load_cluster("h100-sxm-80:2x2")))
    lean = replace(asked, request=replace(asked.request, optimizer="sgd"))
    assert ("2 nodes in place of 1" in message) == _fits(wide)
    assert ("with --optimizer sgd" in message) == _fits(lean)
    assert "it would fit with" in message
    assert "smallest budget" in message


def _fits(asked: Question) -> bool:
    shared, wanted = asked.shared, asked.request
    try:
        best_plan(shared, candidates(GRAPH, shared.cluster, wanted), wanted.budget_bytes, limits=asked.limits)
    except NoFeasiblePlan:
        return False
    return True
