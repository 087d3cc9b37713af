"""The time of a long step is that of all its operations, found in a moment; the bounds are below it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galv.cost_models.estimate import StageSeconds, pipeline_seconds
from galv.cost_models.in_flight import Held, activations_in_flight, held, held_bytes
from galv.cost_models.makespan import makespan_floor_seconds, makespan_seconds
from galv.cost_models.pipeline import simulate
from galv.cost_models.schedules import ChunkSeconds, simulate_orders
from galv.cost_models.schedules import makespan_seconds as last_end_seconds
from galv.planner.plan import ScheduleName
from galv.schedules import orders

KINDS: list[tuple[ScheduleName, int]] = [("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2), ("1f1b", 1)]


@dataclass(frozen=True)
class Case:
    """A schedule over uneven chunks."""

    schedule: ScheduleName
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    num_microbatches: int
    transfer: float
    virtual_stages: int

    @property
    def arguments(self) -> tuple[object, ...]:
        """As the functions take them."""
        borders = (self.transfer,) * (len(self.forward) - 1)
        seconds = self.forward, self.backward, self.weight
        return self.schedule, *seconds, self.num_microbatches, borders, self.virtual_stages

    def simulated(self) -> float:
        """The makespan, operation by operation."""
        p = len(self.forward) // self.virtual_stages
        order = orders(self.schedule, p, self.num_microbatches, self.virtual_stages)
        seconds = ChunkSeconds(self.forward, self.backward, self.weight)
        return last_end_seconds(simulate_orders(order, seconds, self.transfer))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few and many microbatches; times that repeat, so that stages wait for each other in many ways."""
    schedule, virtual = draw(st.sampled_from(KINDS))
    p = draw(st.integers(1, 4))
    times = st.sampled_from([0.5, 1.0, 1.25, 1.7, 3.0])
    forward, backward = (tuple(draw(times) for _ in range(p * virtual)) for _ in range(2))
    weight = tuple(draw(st.sampled_from([0.0, 0.5, 0.6])) * b for b in backward)
    return Case(schedule, forward, backward, weight, draw(st.integers(1, 70)), draw(st.sampled_from([0, 0.3])), virtual)


@settings(max_examples=60)
@given(cases())
def test_the_makespan_is_that_of_all_operations(case: Case) -> None:
    """Skipping the repeats changes nothing, and the bound is not above it."""
    exact = case.simulated()

    assert makespan_seconds(*case.arguments) == pytest.approx(exact)  # type: ignore[arg-type]
    assert makespan_floor_seconds(*case.arguments) <= exact * (1 + 1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_interleaving_wins_on_deep_pipelines(virtual: int) -> None:
    """With v chunks a rank the bubble of p - 1 microbatches is v times shorter (Narayanan et al. 2021)."""
    p, m = 8, 32
    schedule: ScheduleName = "interleaved" if virtual > 1 else "1f1b"
    chunks = [StageSeconds(1.0 / virtual, 2.0 / virtual, 0.0)] * (p * virtual)

    assert pipeline_seconds(schedule, chunks, m, 0.0, virtual) == pytest.approx(3.0 * (m + (p - 1) / virtual))


def test_each_rank_ends_its_step_for_all_its_chunks() -> None:
    """Work once a step adds up over the chunks of a rank: under ZBV the first and the last lie on one."""
    chunks = [StageSeconds(1.0, 2.0, step, 1.0) for step in (4.0, 0.0, 1.0, 2.0)]
    idle = [StageSeconds(1.0, 2.0, 0.0, 1.0)] * 4

    assert pipeline_seconds("zbv", chunks, 8, 0.1, 2) - pipeline_seconds("zbv", idle, 8, 0.1, 2) == pytest.approx(6.0)


def test_plain_schedules_take_what_their_closed_forms_say() -> None:
    """The program of 1F1B is the recurrence of `simulate`."""
    f, b, c = (1.0, 1.3, 0.8), (2.0, 2.1, 2.9), (0.1, 0.1)
    assert makespan_seconds("1f1b", f, b, b, 50, c) == pytest.approx(simulate("1f1b", f, b, 50, c).makespan_seconds)


def test_long_steps_are_quick() -> None:
    """16 ranks with 4 chunks each and 256 microbatches: a few milliseconds once the schedule is known."""
    n = 64
    times = [tuple(1.0 + 0.01 * ((7 * chunk + shift) % 5) for chunk in range(n)) for shift in range(6)]
    pass_over = [makespan_seconds("interleaved", f, f, f, 256, (0.05,) * (n - 1), 4) for f in times[:1]]
    start = time.process_time()
    pass_over += [makespan_seconds("interleaved", f, f, f, 256, (0.05,) * (n - 1), 4) for f in times[1:]]

    assert (time.process_time() - start) / 5 < 0.02
    assert min(pass_over) > 256 * 4 * 2.0


# ----------------------------------------------------------------------------------------------- in flight


@pytest.mark.parametrize("m", [1, 3, 4, 10, 37])
@pytest.mark.parametrize("schedule, virtual", KINDS)
def test_in_flight_counts_are_those_of_the_order(schedule: ScheduleName, virtual: int, m: int) -> None:
    """Replaying all of a rank's order, it never holds more than the moments say, and just that at each of them."""
    p = 3
    for rank, run in enumerate(orders(schedule, p, m, virtual).ranks):
        moments = held(schedule, rank, p, m, virtual)
        own = sorted({operation.chunk for operation in run})
        counts, seen = {chunk: [0, 0] for chunk in own}, set()
        for kind, chunk, _ in run:
            whole, factors = {"forward": (1, 0), "backward": (-1, 0), "input": (-1, 1), "weight": (0, -1)}[kind]
            counts[chunk][0] += whole
            counts[chunk][1] += factors
            seen.add(tuple(Held(*counts[chunk]) for chunk in own))
        for now in seen:
            assert any(
                all(a <= b for x, y in zip(now, m, strict=True) for a, b in zip(x, y, strict=True)) for m in moments
            )
        assert set(moments) <= seen


def test_in_flight_counts_of_the_papers() -> None:
    """1F1B, interleaved 1F1B, ZB-H1 and ZBV with four ranks; a chunk counts as its part of the rank."""
    assert [activations_in_flight("1f1b", rank, 4, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [activations_in_flight("interleaved", rank, 4, 16, 2) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert [activations_in_flight("zb-h1", rank, 4, 16) for rank in range(4)] == [4, 4, 4, 4]
    assert all(activations_in_flight("zbv", rank, 4, 16, 2) <= 4 for rank in range(4))
    assert activations_in_flight("zb-h1", 3, 4, 16, factor_share=0.0) == 1


def test_bytes_are_of_the_fullest_moment() -> None:
    """Which moment is fullest depends on the chunks' sizes."""
    moments = [(Held(2, 0), Held(0, 1)), (Held(0, 0), Held(3, 0))]

    assert held_bytes(moments, (10.0, 1.0), (5.0, 0.5)) == 20.5
    assert held_bytes(moments, (1.0, 10.0), (0.5, 5.0)) == 30.0
