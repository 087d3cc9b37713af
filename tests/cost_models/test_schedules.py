"""Schedules as orders of operations: complete, possible, as fast as the papers say, and readable as traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.pipeline import simulate
from galv.cost_models.schedules import (
    ChunkSeconds,
    Operation,
    Orders,
    bubble_seconds,
    chrome_trace,
    interleaved_in_flight,
    interleaved_orders,
    interleaved_seconds,
    makespan_seconds,
    plain_orders,
    simulate_orders,
    zero_bubble_h1_orders,
    zero_bubble_v_orders,
)


def even(orders: Orders, forward: float = 1.0, backward: float = 2.0) -> ChunkSeconds:
    """Times of a model cut evenly: each rank takes `forward` and `backward` in all its chunks together."""
    chunks, ranks = orders.num_chunks, len(orders.ranks)
    return ChunkSeconds((forward * ranks / chunks,) * chunks, (backward * ranks / chunks,) * chunks)


def all_orders(num_ranks: int, num_microbatches: int) -> list[Orders]:
    """One of each schedule."""
    return [
        plain_orders("gpipe", num_ranks, num_microbatches),
        plain_orders("1f1b", num_ranks, num_microbatches),
        interleaved_orders(num_ranks, num_microbatches, 2),
        zero_bubble_h1_orders(num_ranks, num_microbatches),
        zero_bubble_v_orders(num_ranks, num_microbatches),
    ]


@given(st.integers(1, 5), st.integers(1, 12), st.floats(0.0, 0.5))
def test_every_operation_runs_once_after_what_it_needs(num_ranks: int, num_microbatches: int, transfer: float) -> None:
    """Each schedule runs each chunk's forward and backward of each microbatch once, and never deadlocks."""
    for orders in all_orders(num_ranks, num_microbatches):
        events = simulate_orders(orders, even(orders), transfer)
        counts = Counter((e.operation.kind, e.operation.chunk, e.operation.microbatch) for e in events)
        assert set(counts.values()) == {1}
        forwards = sum(e.operation.kind == "forward" for e in events)
        assert forwards == orders.num_chunks * num_microbatches
        ends = {event.operation: event.end_seconds for event in events}
        for event in events:
            kind, chunk, i = event.operation
            if kind == "forward" and chunk:
                assert event.start_seconds >= ends[Operation("forward", chunk - 1, i)] - 1e-9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(st.integers(1, 5), st.integers(0, 8), st.floats(0.0, 1.0))
def test_events_agree_with_the_closed_forms(schedule: str, num_ranks: int, more: int, transfer: float) -> None:
    """For GPipe and 1F1B the simulation of orders gives what `pipeline.simulate` gives."""
    m = num_ranks + more
    orders = plain_orders(schedule, num_ranks, m)  # type: ignore[arg-type]
    forward = tuple(1.0 + 0.3 * s for s in range(num_ranks))
    backward = tuple(2.0 - 0.2 * s for s in range(num_ranks))
    events = simulate_orders(orders, ChunkSeconds(forward, backward), transfer)
    expected = simulate(schedule, forward, backward, m, (transfer,) * (num_ranks - 1))  # type: ignore[arg-type]

    assert makespan_seconds(events) == pytest.approx(expected.makespan_seconds)


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    """With v chunks a rank the bubble of p - 1 slots is v times shorter (Narayanan et al. 2021)."""
    p, m = 4, 16
    orders = interleaved_orders(p, m, virtual)
    total = makespan_seconds(simulate_orders(orders, even(orders)))

    assert total == pytest.approx(m * 3.0 + (p - 1) * 3.0 / virtual)


def test_zero_bubble_schedules_wait_less() -> None:
    """With forward, input and weight parts of equal length ZB-H1 has a third of 1F1B's bubble, ZBV less than that."""
    p, m = 4, 16
    bubbles = {}
    for orders in all_orders(p, m):
        events = simulate_orders(orders, even(orders))
        bubbles[orders.name] = makespan_seconds(events) - m * 3.0

    assert bubbles["1f1b"] == pytest.approx((p - 1) * 3.0)
    assert bubbles["zb-h1"] <= bubbles["1f1b"] / 3 + 1e-9
    assert bubbles["zbv"] < bubbles["zb-h1"] + 1e-9


@pytest.mark.parametrize("make", [zero_bubble_h1_orders, zero_bubble_v_orders])
def test_zero_bubble_schedules_hold_no_more_than_they_may(make: Callable[[int, int], Orders]) -> None:
    """No rank holds more activations than 1F1B's first stage does, a half chunk of ZBV counting half."""
    p, m = 4, 12
    orders = make(p, m)
    for rank, order in enumerate(orders.ranks):
        held = most = 0
        for operation in order:
            held += {"forward": 1, "weight": -1}.get(operation.kind, 0)
            most = max(most, held)
        assert most <= orders.num_chunks, rank


def test_in_flight_counts_the_warm_up() -> None:
    """The closed form is the largest number of chunk activations that the order holds."""
    p, m, v = 4, 16, 2
    orders = interleaved_orders(p, m, v)
    for rank, order in enumerate(orders.ranks):
        held = most = 0
        for operation in order:
            held += 1 if operation.kind == "forward" else -1
            most = max(most, held)
        assert interleaved_in_flight(rank, p, m, v) == most / v


@pytest.mark.parametrize("m", [17, 24, 40, 61])
def test_long_steps_extend_short_ones(m: int) -> None:
    """The extension is what simulating all microbatches gives."""
    forward, backward = [1.0, 1.0, 1.2, 1.5], [2.0, 2.0, 2.1, 2.6]
    orders = interleaved_orders(4, m, 2)
    seconds = ChunkSeconds(tuple(forward[c % 4] / 2 for c in range(8)), tuple(backward[c % 4] / 2 for c in range(8)))
    exact = makespan_seconds(simulate_orders(orders, seconds, 0.1))

    assert interleaved_seconds(forward, backward, m, 2, 0.1) == pytest.approx(exact, rel=0.02)


def test_a_chrome_trace_covers_every_rank_to_the_end() -> None:
    """Operations and bubbles of a rank follow each other without gap from 0 to the makespan, in microseconds."""
    orders = plain_orders("1f1b", 3, 4)
    events = simulate_orders(orders, even(orders), reduce_seconds=(0.5, 0.4, 0.3))
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
    orders = plain_orders("1f1b", 4, 8)
    bubbles = bubble_seconds(simulate_orders(orders, even(orders)), 4)

    assert [sum(parts) for parts in bubbles] == pytest.approx([9.0] * 4)
    assert bubbles[0] == pytest.approx((0.0, 9.0, 0.0))
    assert bubbles[3] == pytest.approx((3.0, 0.0, 6.0))
