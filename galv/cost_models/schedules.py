"""Timelines of pipeline schedules: a discrete-event simulation of any orders, where the bubbles are, and Chrome traces.

`makespan` and `pipeline` find how long a step takes without all of this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from galv.schedules import Operation, Orders


@dataclass(frozen=True, slots=True)
class Event:
    """One operation with its time; seconds from the step's start."""

    rank: int
    operation: Operation
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """How long the operations of each chunk take. `input` and `weight` share what `backward` is whole."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """The part of backward that makes weight gradients."""

    def of(self, operation: Operation) -> float:
        """Seconds of `operation`."""
        kind, chunk, _ = operation
        if kind == "forward":
            return self.forward[chunk]
        if kind == "weight":
            return self.weight[chunk]
        return self.backward[chunk] - (self.weight[chunk] if kind == "input" else 0.0)


def simulate_orders(
    orders: Orders, seconds: ChunkSeconds, transfer_seconds: float = 0.0, reduce_seconds: Sequence[float] = ()
) -> tuple[Event, ...]:
    """Every operation with its time, in the order in which they end.

    An operation starts when its rank is free and what it needs has arrived: a forward needs the chunk before, a
    backward its own forward and the chunk after; between ranks a transfer lies. `reduce_seconds`, one a rank, is
    gradient reduction after a rank's last operation, shown as an operation of kind `weight` and microbatch -1.
    """
    ended: dict[Operation, float] = {}
    events: list[Event] = []
    free, position = [0.0] * len(orders.ranks), [0] * len(orders.ranks)
    waiting = set(range(len(orders.ranks)))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            moved |= _advance(orders, rank, seconds, transfer_seconds, (ended, events, free, position))
            if position[rank] == len(orders.ranks[rank]):
                waiting.discard(rank)
        assert moved, f"the orders of {orders.name} wait for each other"
    for rank, more in enumerate(reduce_seconds):
        events.append(Event(rank, Operation("weight", -1, -1), free[rank], free[rank] + more))
    return tuple(sorted(events, key=lambda event: (event.end_seconds, event.rank)))


_State = tuple[dict[Operation, float], list[Event], list[float], list[int]]


def _advance(orders: Orders, rank: int, seconds: ChunkSeconds, transfer: float, state: _State) -> bool:
    """Runs operations of `rank` until one must wait for another rank; whether any ran."""
    ended, events, free, position = state
    order, moved = orders.ranks[rank], False
    while position[rank] < len(order):
        operation = order[position[rank]]
        ready = _ready(operation, orders, ended, transfer)
        if ready is None:
            break
        start = max(free[rank], ready)
        free[rank] = ended[operation] = start + seconds.of(operation)
        events.append(Event(rank, operation, start, free[rank]))
        position[rank] += 1
        moved = True
    return moved


def _ready(operation: Operation, orders: Orders, ended: dict[Operation, float], transfer: float) -> float | None:
    """When the operation's inputs are there; None while one has not been made."""
    ready = 0.0
    for needed in orders.needs(operation):
        end = ended.get(needed)
        if end is None:
            return None
        apart = orders.rank_of(needed.chunk) != orders.rank_of(operation.chunk)
        ready = max(ready, end + (transfer if apart else 0.0))
    return ready


# ----------------------------------------------------------------------------------------------- what a timeline says


def makespan_seconds(events: Sequence[Event]) -> float:
    """When the last operation ends."""
    return max(event.end_seconds for event in events)


def bubble_seconds(events: Sequence[Event], num_ranks: int) -> tuple[tuple[float, float, float], ...]:
    """For each rank its idle seconds: before its first operation, between operations, after its last."""
    total = makespan_seconds(events)
    found = []
    for rank in range(num_ranks):
        mine = [event for event in events if event.rank == rank]
        first, last = min(e.start_seconds for e in mine), max(e.end_seconds for e in mine)
        busy = sum(e.end_seconds - e.start_seconds for e in mine)
        found.append((first, last - first - busy, total - last))
    return tuple(found)


def chrome_trace(events: Sequence[Event]) -> str:
    """The timeline as a Chrome trace in JSON: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

    One row a rank; idle times are in it as events called `bubble`, so that the trace says where they are.
    """
    ranks = sorted({event.rank for event in events})
    rows = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in ranks
    ]
    rows += [
        _trace_event(_label(e.operation), e.operation.kind, e.rank, e.start_seconds, e.end_seconds) for e in events
    ]
    for rank in ranks:
        mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.start_seconds)
        ends = [0.0, *(e.end_seconds for e in mine)]
        starts = [*(e.start_seconds for e in mine), makespan_seconds(events)]
        gaps = zip(ends, starts, strict=True)
        rows += [_trace_event("bubble", "bubble", rank, a, b) for a, b in gaps if b - a > 1e-12]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def _label(operation: Operation) -> str:
    if operation.microbatch < 0:
        return "reduce gradients"
    return f"{operation.kind} {operation.microbatch} chunk {operation.chunk}"


def _trace_event(name: str, category: str, rank: int, start: float, end: float) -> dict[str, object]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": rank, **times}
