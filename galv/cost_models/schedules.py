"""Pipeline schedules as orders of operations, and a discrete-event simulation of any of them.

A pipeline rank holds one or more chunks of the model. Chunks are numbered along the model; an operation is the forward
of a chunk for a microbatch, its whole backward, or, where a schedule splits it, the part of backward that makes the
input's gradient and the part that makes the weights'. `pipeline.simulate` knows closed forms for the plain schedules;
here are the interleaved ones and those without bubbles, and timelines to look at.

Orders: GPipe (Huang et al. 2019) and 1F1B of `pipeline.stage_order`; interleaved 1F1B (Narayanan et al. 2021), where
rank r of p holds the chunks r, r + p, ...; ZB-H1 and ZBV (Qi et al. 2024, "Zero Bubble Pipeline Parallelism" and
"Pipeline Parallelism with Controllable Memory"), where backward is split and, in ZBV, rank r holds the chunks r and
2p - 1 - r.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from galv.cost_models.pipeline import stage_order

Kind = Literal["forward", "backward", "input", "weight"]
Placement = Literal["line", "loop", "v"]


class Operation(NamedTuple):
    """One piece of work of one rank."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What each rank runs, in order."""

    name: str
    placement: Placement
    num_chunks: int
    ranks: tuple[tuple[Operation, ...], ...]

    def rank_of(self, chunk: int) -> int:
        """The rank that holds `chunk`."""
        num_ranks = len(self.ranks)
        if self.placement == "v":
            return chunk if chunk < num_ranks else 2 * num_ranks - 1 - chunk
        return chunk % num_ranks


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
    weight_share: float = 0.5
    """The part of backward that makes weight gradients."""

    def of(self, operation: Operation) -> float:
        """Seconds of `operation`."""
        if operation.kind == "forward":
            return self.forward[operation.chunk]
        whole = self.backward[operation.chunk]
        share = {"backward": 1.0, "weight": self.weight_share, "input": 1 - self.weight_share}[operation.kind]
        return whole * share


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
    kind, chunk, microbatch = operation
    ready = 0.0
    for needed in _needs(kind, chunk, microbatch, orders):
        end = ended.get(needed)
        if end is None:
            return None
        apart = orders.rank_of(needed.chunk) != orders.rank_of(chunk)
        ready = max(ready, end + (transfer if apart else 0.0))
    return ready


def _needs(kind: Kind, chunk: int, microbatch: int, orders: Orders) -> list[Operation]:
    if kind == "forward":
        return [Operation("forward", chunk - 1, microbatch)] if chunk else []
    if kind == "weight":
        return [Operation("input", chunk, microbatch)]
    after = [Operation(kind, chunk + 1, microbatch)] if chunk + 1 < orders.num_chunks else []
    return [Operation("forward", chunk, microbatch), *after]


# ----------------------------------------------------------------------------------------------- orders


def plain_orders(name: Literal["gpipe", "1f1b"], num_ranks: int, num_microbatches: int) -> Orders:
    """GPipe or 1F1B, one chunk a rank."""
    ranks = tuple(
        tuple(Operation(kind, rank, i) for kind, i in stage_order(name, rank, num_ranks, num_microbatches))
        for rank in range(num_ranks)
    )
    return Orders(name, "line", num_ranks, ranks)


@lru_cache(maxsize=64)
def interleaved_orders(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Orders:
    """Interleaved 1F1B: microbatches go through a rank's chunks in groups of as many as there are ranks.

    Megatron-LM asks for whole groups; where the last one is not, all forwards run before the first backward.
    """
    p, v = num_ranks, virtual_stages
    groups = [range(i, min(i + p, num_microbatches)) for i in range(0, num_microbatches, p)]
    forwards = [(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    ranks = []
    for rank in range(p):
        ahead = len(forwards) if num_microbatches % p else 2 * (p - rank - 1) + (v - 1) * p + 1
        ahead = min(ahead, len(forwards))
        order = [Operation("forward", c * p + rank, i) for c, i in forwards[:ahead]]
        for k, (c, i) in enumerate(backwards):
            order.append(Operation("backward", c * p + rank, i))
            if k + ahead < len(forwards):
                c, i = forwards[k + ahead]
                order.append(Operation("forward", c * p + rank, i))
        ranks.append(tuple(order))
    return Orders("interleaved", "loop", p * v, tuple(ranks))


def interleaved_in_flight(rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int) -> float:
    """The most microbatches whose activations a rank holds at once, a chunk counting as its part of the rank."""
    ahead = 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks + 1
    return min(ahead, num_microbatches * virtual_stages) / virtual_stages


def zero_bubble_h1_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """ZB-H1: 1F1B whose rank r puts weight parts off by r microbatches, so that input parts travel sooner.

    Every rank holds at most p activations, as the first rank of 1F1B does.
    """
    p, m = num_ranks, num_microbatches
    ranks = []
    for rank in range(p):
        ahead = min(p - rank, m)
        order = [Operation("forward", rank, i) for i in range(ahead)]
        for i in range(m):
            order.append(Operation("input", rank, i))
            if i >= rank:
                order.append(Operation("weight", rank, i - rank))
            if i + ahead < m:
                order.append(Operation("forward", rank, i + ahead))
        order += [Operation("weight", rank, i) for i in range(max(m - rank, 0), m)]
        ranks.append(tuple(order))
    return Orders("zb-h1", "line", p, tuple(ranks))


def zero_bubble_v_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """ZBV, found by running its rule with equal times for forward, input and weight parts.

    A free rank runs the input part of a backward that is ready, else a forward while it may hold another activation,
    else a weight part. Every rank holds at most 2 p activations of half its units, what 1F1B's first rank holds.
    """
    empty = Orders("zbv", "v", 2 * num_ranks, ((),) * num_ranks)
    return Orders("zbv", "v", 2 * num_ranks, _greedy(empty, num_microbatches, 2 * num_ranks))


def _greedy(shape: Orders, num_microbatches: int, most_held: int) -> tuple[tuple[Operation, ...], ...]:
    """The orders in which ranks run their operations under the rule of `zero_bubble_v_orders`."""
    num_ranks = len(shape.ranks)
    todo = [
        {
            Operation(kind, chunk, i)
            for chunk in range(shape.num_chunks)
            if shape.rank_of(chunk) == rank
            for i in range(num_microbatches)
            for kind in ("forward", "input", "weight")
        }
        for rank in range(num_ranks)
    ]
    ended: dict[Operation, float] = {}
    orders: list[list[Operation]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    clock = [(0.0, rank) for rank in range(num_ranks)]
    heapq.heapify(clock)
    while clock:
        now, rank = heapq.heappop(clock)
        chosen = _choose(todo[rank], shape, ended, now, held[rank] < most_held)
        if chosen is None:
            if todo[rank]:
                heapq.heappush(clock, (now + 1.0, rank))
            continue
        todo[rank].discard(chosen)
        orders[rank].append(chosen)
        ended[chosen] = now + 1.0
        held[rank] += {"forward": 1, "input": 0, "weight": -1, "backward": 0}[chosen.kind]
        heapq.heappush(clock, (now + 1.0, rank))
    return tuple(tuple(order) for order in orders)


def _choose(
    todo: set[Operation], shape: Orders, ended: dict[Operation, float], now: float, may_hold: bool
) -> Operation | None:
    """What a free rank runs next; None when nothing is ready."""
    ready = [
        op
        for op in todo
        if (op.kind != "forward" or may_hold) and (at := _ready(op, shape, ended, 0.0)) is not None and at <= now + 1e-9
    ]
    rank = {"input": 0, "forward": 1, "weight": 2, "backward": 0}
    return min(ready, key=lambda op: (rank[op.kind], op.microbatch, -op.chunk), default=None)


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


def interleaved_seconds(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    num_microbatches: int,
    virtual_stages: int,
    transfer_seconds: float,
) -> float:
    """Makespan of interleaved 1F1B whose ranks take the given times for one microbatch, evenly over their chunks.

    Beyond a few rounds every p microbatches take the same time, so long steps are extended from short ones.
    """
    p, v = len(forward_seconds), virtual_stages
    seconds = ChunkSeconds(
        tuple(forward_seconds[c % p] / v for c in range(p * v)),
        tuple(backward_seconds[c % p] / v for c in range(p * v)),
    )

    def run(rounds: int) -> float:
        return makespan_seconds(simulate_orders(interleaved_orders(p, rounds, v), seconds, transfer_seconds))

    if num_microbatches <= 4 * p:
        return run(num_microbatches)
    rest = num_microbatches % p
    short, longer = run(2 * p + rest), run(3 * p + rest)
    return longer + (longer - short) * (num_microbatches - rest - 3 * p) / p
