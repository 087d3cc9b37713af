"""Schedules as orders of operations: complete, possible, as fast as the papers say, and readable as traces."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.pipeline import simulate
from galv.cost_models.schedules import ChunkSeconds, bubble_seconds, chrome_trace, makespan_seconds, simulate_orders
from galv.planner.plan import ScheduleName
from galv.schedules import Operation, Orders, orders

ALL: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def even(order: Orders, forward: float = 1.0, backward: float = 2.0) -> ChunkSeconds:
    """Times of a model cut evenly: each rank takes `forward` and `backward` in all its chunks together."""
    chunks, ranks = order.num_chunks, len(order.ranks)
    part = ranks / chunks
    return ChunkSeconds((forward * part,) * chunks, (backward * part,) * chunks, (backward * part / 2,) * chunks)


def all_orders(num_ranks: int, num_microbatches: int) -> list[Orders]:
    """One of each schedule."""
    return [orders(name, num_ranks, num_microbatches, 2 if name in ("interleaved", "zbv") else 1) for name in ALL]


@given(st.integers(1, 5), st.integers(1, 12), st.floats(0.0, 0.5))
def test_every_operation_runs_once_after_what_it_needs(num_ranks: int, num_microbatches: int, transfer: float) -> None:
    """Each schedule runs each chunk's forward and backward of each microbatch once, and never deadlocks."""
    for order in all_orders(num_ranks, num_microbatches):
        events = simulate_orders(order, even(order), transfer)
        counts = Counter((e.operation.kind, e.operation.chunk, e.operation.microbatch) for e in events)
        assert set(counts.values()) == {1}
        forwards = sum(e.operation.kind == "forward" for e in events)
        assert forwards == order.num_chunks * num_microbatches
        ends = {event.operation: event.end_seconds for event in events}
        for event in events:
            kind, chunk, i = event.operation
            if kind == "forward" and chunk:
                assert event.start_seconds >= ends[Operation("forward", chunk - 1, i)] - 1e-9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(st.integers(1, 5), st.integers(0, 8), st.floats(0.0, 1.0))
def test_events_agree_with_the_closed_forms(schedule: ScheduleName, num_ranks: int, more: int, transfer: float) -> None:
    """For GPipe and 1F1B the simulation of orders gives what `pipeline.simulate` gives."""
    m = num_ranks + more
    forward = tuple(1.0 + 0.3 * s for s in range(num_ranks))
    backward = tuple(2.0 - 0.2 * s for s in range(num_ranks))
    events = simulate_orders(orders(schedule, num_ranks, m), ChunkSeconds(forward, backward, backward), transfer)
    expected = simulate(schedule, forward, backward, m, (transfer,) * (num_ranks - 1))

    assert makespan_seconds(events) == pytest.approx(expected.makespan_seconds)


@pytest.mark.parametrize("virtual", [2, 4])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    """With v chunks a rank the bubble of p - 1 slots is v times shorter (Narayanan et al. 2021)."""
    p, m = 4, 16
    order = orders("interleaved", p, m, virtual)
    total = makespan_seconds(simulate_orders(order, even(order)))

    assert total == pytest.approx(m * 3.0 + (p - 1) * 3.0 / virtual)


def test_zero_bubble_schedules_wait_less() -> None:
    """With forward, input and weight parts of equal length ZB-H1 has a third of 1F1B's bubble, ZBV less than that."""
    p, m = 4, 16
    bubbles = {}
    for order in all_orders(p, m):
        events = simulate_orders(order, even(order))
        bubbles[order.name] = makespan_seconds(events) - m * 3.0

    assert bubbles["1f1b"] == pytest.approx((p - 1) * 3.0)
    assert bubbles["zb-h1"] <= bubbles["1f1b"] / 3 + 1e-9
    assert bubbles["zbv"] < bubbles["zb-h1"] + 1e-9


@pytest.mark.parametrize("order", all_orders(4, 12)[3:], ids=lambda order: order.name)
def test_zero_bubble_schedules_hold_no_more_than_they_may(order: Orders) -> None:
    """No rank holds more activations than 1F1B's first stage does, a half chunk of ZBV counting half."""
    for rank, run in enumerate(order.ranks):
        held = most = 0
        for operation in run:
            held += {"forward": 1, "weight": -1}.get(operation.kind, 0)
            most = max(most, held)
        assert most <= order.num_chunks, rank


def test_a_chrome_trace_covers_every_rank_to_the_end() -> None:
    """Operations and bubbles of a rank follow each other without gap from 0 to the makespan, in microseconds."""
    order = orders("1f1b", 3, 4)
    events = simulate_orders(order, even(order), reduce_seconds=(0.5, 0.4, 0.3))
    trace = json.loads(chrome_trace(events))["traceEvents"]
    total = makespan_seconds(events) * 1e6

    for rank in range(3):
        pieces = sorted((e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X" and e["tid"] == rank)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == pytest.approx(total)
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(pieces))
    assert {e["cat"] for e in trace if e["ph"] == "X"} == {"forward", "backward", "weight", "bubble"}


def test_bubbles_say_where_they_are() -> None:
    """In 1F1B the last rank waits before its first operation, the first rank in the middle of the step."""
    order = orders("1f1b", 4, 8)
    bubbles = bubble_seconds(simulate_orders(order, even(order)), 4)

    assert [sum(parts) for parts in bubbles] == pytest.approx([9.0] * 4)
    assert bubbles[0] == pytest.approx((0.0, 9.0, 0.0))
    assert bubbles[3] == pytest.approx((3.0, 0.0, 6.0))
