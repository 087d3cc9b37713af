"""The pipeline simulation against an independent one, closed forms and its own lower bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.pipeline import (
    executed_schedule,
    makespan_lower_bound_seconds,
    num_in_flight,
    simulate,
)
from galv.planner.plan import ScheduleName
from galv.schedules import stage_order

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Case:
    """Times of a pipeline."""

    schedule: ScheduleName
    forward: list[float]
    backward: list[float]
    num_microbatches: int
    transfer: list[float]

    @property
    def arguments(self) -> tuple[ScheduleName, list[float], list[float], int, list[float]]:
        return self.schedule, self.forward, self.backward, self.num_microbatches, self.transfer


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Pipelines of up to 6 stages, with many ties among the times."""
    num_stages = draw(st.integers(1, 6))
    seconds = st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.05, 10.0))
    transfers = st.one_of(st.just(0.0), st.floats(0.0, 2.0))
    return Case(
        draw(st.sampled_from(SCHEDULES)),
        [draw(seconds) for _ in range(num_stages)],
        [draw(seconds) for _ in range(num_stages)],
        draw(st.integers(1, 30)),
        [draw(transfers) for _ in range(num_stages - 1)],
    )


def longest_chain_ends(case: Case) -> list[float]:
    """When each stage ends, by the longest path over the graph of all operations, relaxed until nothing changes."""
    num_stages, m = len(case.forward), case.num_microbatches
    before: dict[tuple[int, str, int], list[tuple[tuple[int, str, int], float]]] = {}
    for s in range(num_stages):
        order = stage_order(case.schedule, s, num_stages, m)
        for position, (phase, i) in enumerate(order):
            needs = [((s, *order[position - 1]), 0.0)] if position else []
            if phase == "forward" and s > 0:
                needs.append(((s - 1, phase, i), case.transfer[s - 1]))
            if phase == "backward" and s < num_stages - 1:
                needs.append(((s + 1, phase, i), case.transfer[s]))
            before[s, phase, i] = needs
    ends = dict.fromkeys(before, 0.0)
    changed = True
    while changed:
        changed = False
        for operation, needs in before.items():
            own = (case.forward if operation[1] == "forward" else case.backward)[operation[0]]
            end = own + max((ends[need] + delay for need, delay in needs), default=0.0)
            if end > ends[operation]:
                ends[operation], changed = end, True
    return [max(end for (stage, _, _), end in ends.items() if stage == s) for s in range(num_stages)]


@given(cases())
def test_simulation_equals_the_longest_chain_of_operations(case: Case) -> None:
    """Every stage ends when the longest chain of operations before its end allows."""
    timeline = simulate(*case.arguments)
    expected = longest_chain_ends(case)

    assert timeline.end_seconds == pytest.approx(expected)
    assert timeline.makespan_seconds == pytest.approx(max(expected))


@given(cases())
def test_the_lower_bound_is_one(case: Case) -> None:
    """No simulation is shorter than the bound."""
    assert makespan_lower_bound_seconds(*case.arguments) <= simulate(*case.arguments).makespan_seconds * (1 + 1e-12)


@given(cases())
def test_the_lower_bound_is_close(case: Case) -> None:
    """The bound is at least the busiest stage with its way in and out, and microbatch 0's round trip."""
    bound = makespan_lower_bound_seconds(*case.arguments)
    busy = [case.num_microbatches * (f + b) for f, b in zip(case.forward, case.backward, strict=True)]
    trip = sum(case.forward) + sum(case.backward) + 2 * sum(case.transfer)

    assert bound >= max(*busy, trip) * (1 - 1e-12)


@given(cases(), st.data())
def test_longer_times_never_shorten_step_or_bound(case: Case, data: st.DataObject) -> None:
    """Making one stage slower never makes the step faster; nor does it lower the bound."""
    slower = list(case.forward)
    slower[data.draw(st.integers(0, len(slower) - 1))] += data.draw(st.floats(0.0, 5.0))
    arguments = (case.schedule, slower, case.backward, case.num_microbatches, case.transfer)

    assert simulate(*arguments).makespan_seconds >= simulate(*case.arguments).makespan_seconds * (1 - 1e-12)
    assert makespan_lower_bound_seconds(*arguments) >= makespan_lower_bound_seconds(*case.arguments) * (1 - 1e-12)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 16),
    st.integers(1, 200),
    st.floats(0.01, 10.0),
    st.floats(0.01, 10.0),
)
def test_equal_stages_have_the_textbook_makespan(
    schedule: ScheduleName, num_stages: int, num_microbatches: int, forward: float, backward: float
) -> None:
    """Without transfers a step of equal stages takes (m + p - 1)(f + b), and the bound says so too."""
    arguments = (schedule, [forward] * num_stages, [backward] * num_stages, num_microbatches)
    expected = pytest.approx((num_microbatches + num_stages - 1) * (forward + backward))

    assert simulate(*arguments).makespan_seconds == expected
    assert makespan_lower_bound_seconds(*arguments) == expected


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.integers(1, 50))
def test_one_stage_has_no_bubble(forward: float, backward: float, num_microbatches: int) -> None:
    """Without a pipeline the step is the microbatches in turn."""
    timeline = simulate("none", [forward], [backward], num_microbatches)

    assert timeline.makespan_seconds == pytest.approx(num_microbatches * (forward + backward))
    assert timeline.busy_seconds[0] == pytest.approx(timeline.makespan_seconds)
    bound = makespan_lower_bound_seconds("none", [forward], [backward], num_microbatches)
    assert bound == pytest.approx(timeline.makespan_seconds)


@given(cases(), st.integers(-3, 3))
def test_time_has_no_preferred_unit(case: Case, exponent: int) -> None:
    """All times doubled, the step is twice as long."""
    scale = 2.0**exponent
    scaled = (
        case.schedule,
        [scale * x for x in case.forward],
        [scale * x for x in case.backward],
        case.num_microbatches,
        [scale * x for x in case.transfer],
    )

    assert simulate(*scaled).makespan_seconds == pytest.approx(scale * simulate(*case.arguments).makespan_seconds)


@given(cases())
def test_transfers_default_to_none(case: Case) -> None:
    """Transfers left out are transfers of no time."""
    silent = (case.schedule, case.forward, case.backward, case.num_microbatches)

    assert simulate(*silent) == simulate(*silent, [0.0] * len(case.transfer))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages, num_microbatches", [(1, 3), (2, 2), (4, 8), (4, 3), (5, 1)])
def test_in_flight_counts_are_those_of_the_order(
    schedule: ScheduleName, num_stages: int, num_microbatches: int
) -> None:
    """Replaying a stage's order, the most forwards whose backward is still to come are what the function says."""
    for stage in range(num_stages):
        alive, most = 0, 0
        for phase, _ in stage_order(schedule, stage, num_stages, num_microbatches):
            alive += 1 if phase == "forward" else -1
            most = max(most, alive)

        assert num_in_flight(schedule, stage, num_stages, num_microbatches) == most
        assert alive == 0


def test_in_flight_counts_of_the_papers() -> None:
    """GPipe keeps all microbatches; 1F1B as many as stages lie ahead, itself included; no pipeline keeps one."""
    assert [num_in_flight("gpipe", s, 4, 8) for s in range(4)] == [8, 8, 8, 8]
    assert [num_in_flight("1f1b", s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert num_in_flight("none", 0, 1, 8) == 1


def test_too_few_microbatches_for_1f1b_run_as_gpipe() -> None:
    """torch's Schedule1F1B refuses fewer microbatches than stages; GPipe runs then, and is what is priced."""
    assert executed_schedule("1f1b", 4, 3) == "gpipe"
    assert executed_schedule("1f1b", 4, 4) == "1f1b"
    assert simulate("1f1b", [1.0] * 4, [2.0] * 4, 3) == simulate("gpipe", [1.0] * 4, [2.0] * 4, 3)
    assert num_in_flight("1f1b", 3, 4, 3) == 3


def test_transfers_slow_1f1b_down_in_the_steady_state() -> None:
    """Neighbours that wait for each other's results pay transfers in every round, not only while filling."""
    few, many = (simulate("1f1b", [1.0, 1.0], [1.0, 1.0], m, [0.5]).makespan_seconds for m in (10, 20))

    assert many - few == pytest.approx(10 * 2.5)


def test_a_large_pipeline_is_simulated_in_no_time() -> None:
    """16 stages of unequal times and 128 microbatches stay well under 5 ms, the median of several runs."""
    forward = [1.0 + 0.013 * (s * 7 % 5) for s in range(16)]
    backward = [2.0 + 0.017 * (s * 11 % 7) for s in range(16)]
    taken = []
    for _ in range(15):
        start = time.process_time()
        simulate("1f1b", forward, backward, 128, [0.01] * 15)
        taken.append(time.process_time() - start)

    assert sorted(taken)[len(taken) // 2] < 5e-3
