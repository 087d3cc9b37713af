"""How long a step of any pipeline schedule takes, without simulating all of its microbatches.

The operations of a schedule, in an order in which each comes after what it waits for, are a program: one pass over it
gives every end time, as an operation ends its own seconds after the later of two others, the one before it on its rank
and the one whose result it takes. For long steps the program is a head, a body that repeats every few microbatches, and
a tail. The pass is a linear recurrence in max and plus: once as many end times as it looks back are those of some
bodies before, each later by the same time, they go on so, and the repeats left over are skipped. What comes out is what
the whole pass gives.

Chunks are numbered along the model; sequences have one entry a chunk, `transfer_seconds` one a border between chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from galv.planner.plan import ScheduleName
from galv.schedules import SPLIT, Operation, Orders, orders, rank_of_chunk

Times = tuple[float, ...]


@lru_cache(maxsize=65536)
def makespan_seconds(
    schedule: ScheduleName,
    forward_seconds: Times,
    backward_seconds: Times,
    weight_seconds: Times,
    num_microbatches: int,
    transfer_seconds: Times,
    virtual_stages: int = 1,
) -> float:
    """Seconds until the last operation of a step has ended.

    `weight_seconds` is the part of `backward_seconds` that makes weight gradients; only schedules that split backward
    look at it. Transfers between chunks of one rank take no time.
    """
    p = len(forward_seconds) // virtual_stages
    program = _program(schedule, p, num_microbatches, virtual_stages)
    inputs = tuple(b - w for b, w in zip(backward_seconds, weight_seconds, strict=True))
    seconds = (*forward_seconds, *backward_seconds, *inputs, *weight_seconds)
    assert len(transfer_seconds) == len(forward_seconds) - 1
    return max(_passed(program, seconds, (*transfer_seconds, 0.0)))


# ----------------------------------------------------------------------------------------------- programs

_Step = tuple[int, int, int, int]
"""Of an operation: where the one before it on its rank is, where the one is whose result it takes, which of the seconds
it takes, and which transfer lies before it (the last one for none)."""
_KINDS = ("forward", "backward", "input", "weight")


@dataclass(frozen=True, slots=True)
class _Program:
    """The operations of a step in an order in which they can be timed."""

    head: tuple[_Step, ...]
    """Places are counted from the start of the step; at place 0, where nothing comes before, stands the time 0."""
    body: tuple[_Step, ...]
    """Places are counted back from the operation itself; so in the tail."""
    repeats: int
    tail: tuple[_Step, ...]
    look_back: int
    """How many of the last end times anything looks at."""


@lru_cache(maxsize=1024)
def _program(schedule: ScheduleName, num_ranks: int, num_microbatches: int, virtual_stages: int) -> _Program:
    """The program of a step, with a body where the step is long."""
    p, m, v = num_ranks, num_microbatches, virtual_stages
    period = p if schedule == "interleaved" else 1
    short = least_microbatches(schedule, p, m)
    if short + period < m:
        found = _parts(schedule, p, short, v, period)
        if found is not None:
            head, body, tail, look_back = found
            return _Program(head, body, (m - short) // period, tail, look_back)
    return _Program(tuple(_steps(orders(schedule, p, m, v))[1]), (), 0, (), 0)


def least_microbatches(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches show all that a schedule does with `num_microbatches`: those less whole periods of it."""
    if schedule != "interleaved":
        return min(6 * num_ranks + 4, num_microbatches)
    over = num_microbatches % num_ranks
    return min((over + 5) * num_ranks + over, num_microbatches)


_Parts = tuple[tuple[_Step, ...], tuple[_Step, ...], tuple[_Step, ...], int]


@lru_cache(maxsize=256)
def _parts(schedule: ScheduleName, num_ranks: int, short: int, virtual_stages: int, period: int) -> _Parts | None:
    """(head, body, tail, look back) of all steps of `short` microbatches and some periods more, None if not found.

    A step that is one period longer has the same operations up to some place, then a body, then those that are left,
    of later microbatches.
    """
    few, steps = _steps(orders(schedule, num_ranks, short, virtual_stages))
    many, more = _steps(orders(schedule, num_ranks, short + period, virtual_stages))
    length = len(many) - len(few)
    same = next((i for i, (a, b) in enumerate(zip(few, many, strict=False)) if a != b), len(few))
    later = [Operation(kind, chunk, i + period) for kind, chunk, i in few]
    if same < 2 * length or many[same + length :] != later[same:]:
        return None
    body, before = _relative(more, same, same + length), _relative(more, same - length, same)
    tail, longer_tail = _relative(steps, same, len(few)), _relative(more, same + length, len(many))
    if body != before or tail != longer_tail or many[same : same + length] != later[same - length : same]:
        return None
    return tuple(steps[:same]), body, tail, max(max(step[:2]) for step in (*body, *tail)) + length


def _relative(steps: Sequence[_Step], start: int, stop: int) -> tuple[_Step, ...]:
    """Steps of a stretch with places counted back; one that takes no result is said to take that before it."""
    found = []
    for place in range(start, stop):
        before, source, seconds, transfer = steps[place]
        found.append((place + 1 - before, place + 1 - (source or before), seconds, transfer))
    return tuple(found)


def _steps(order: Orders) -> tuple[list[Operation], list[_Step]]:
    """The operations in the order in which they start if each takes one tick, and what each waits for."""
    sources = _sources(order)
    ticks: dict[Operation | None, int] = {None: 0}
    for operation, before in _one_by_one(order):
        ticks[operation] = 1 + max(ticks[before], ticks[sources.get(operation)])
    ranks = {operation: rank for rank, run in enumerate(order.ranks) for operation in run}
    listed = sorted(ranks, key=lambda operation: (ticks[operation], ranks[operation]))
    places: dict[Operation | None, int] = {operation: i + 1 for i, operation in enumerate(listed)}
    previous = {b: a for run in order.ranks for a, b in pairwise(run)}
    none, steps = order.num_chunks - 1, []
    for operation in listed:
        kind, chunk, _ = operation
        source = sources.get(operation)
        border = none if source is None else min(chunk, source.chunk)
        seconds = _KINDS.index(kind) * order.num_chunks + chunk
        steps.append((places.get(previous.get(operation), 0), places.get(source, 0), seconds, border))
    return listed, steps


def _sources(order: Orders) -> dict[Operation, Operation]:
    """For each operation the one on another rank whose result it takes, if there is one."""
    ranks = [order.rank_of(chunk) for chunk in range(order.num_chunks)]
    return {
        operation: needed
        for run in order.ranks
        for operation in run
        for needed in order.needs(operation)
        if ranks[needed.chunk] != ranks[operation.chunk]
    }


def _one_by_one(order: Orders) -> list[tuple[Operation, Operation | None]]:
    """All operations, each after those that it waits for, with the one before it on its rank."""
    sources, done = _sources(order), set[Operation | None]([None])
    found: list[tuple[Operation, Operation | None]] = []
    position, moved = [0] * len(order.ranks), True
    while moved:
        moved = False
        for rank, run in enumerate(order.ranks):
            while position[rank] < len(run) and sources.get(run[position[rank]]) in done:
                operation = run[position[rank]]
                found.append((operation, run[position[rank] - 1] if position[rank] else None))
                done.add(operation)
                position[rank] += 1
                moved = True
    assert len(found) == sum(map(len, order.ranks)), f"the orders of {order.name} wait for each other"
    return found


# ----------------------------------------------------------------------------------------------- the pass


def _passed(program: _Program, seconds: Times, transfers: Times) -> list[float]:
    """The last end times of the step, among them that of each rank's last operation."""
    ends = [0.0]
    for before, source, own, transfer in program.head:
        start, arrival = ends[before], ends[source] + transfers[transfer]
        ends.append((arrival if arrival > start else start) + seconds[own])
    left, length = program.repeats, len(program.body)
    while left:
        _extend(ends, program.body, seconds, transfers)
        left -= 1
        for bodies in range(1, min(left, len(ends) // max(length, program.look_back)) + 1):
            step = _same_step(ends, bodies * length, program.look_back)
            if step is not None:
                skipped, left = divmod(left, bodies)
                ends = [end + skipped * step for end in ends[-program.look_back :]]
                break
    _extend(ends, program.tail, seconds, transfers)
    return ends


def _extend(ends: list[float], steps: Sequence[_Step], seconds: Times, transfers: Times) -> None:
    for before, source, own, transfer in steps:
        start, arrival = ends[-before], ends[-source] + transfers[transfer]
        ends.append((arrival if arrival > start else start) + seconds[own])


def _same_step(ends: list[float], distance: int, window: int) -> float | None:
    """By how much each of the last `window` ends is later than that `distance` places before; None when they differ."""
    if len(ends) <= distance + window:
        return None
    step, tolerance = ends[-1] - ends[-1 - distance], 1e-12 * ends[-1]
    for place in range(len(ends) - window, len(ends)):
        if abs(ends[place] - ends[place - distance] - step) > tolerance:
            return None
    return step


# ----------------------------------------------------------------------------------------------- lower bounds


def makespan_floor_seconds(
    schedule: ScheduleName,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    weight_seconds: Sequence[float],
    num_microbatches: int,
    transfer_seconds: Sequence[float],
    virtual_stages: int = 1,
) -> float:
    """A time that no step with these times falls below, found in one go through the chunks.

    A rank waits for the first microbatch to come up to its lowest chunk, does all its work, and what it sends down in
    the end goes on to the first chunk. Weight parts may be done meanwhile, so only what is left of it counts then.
    """
    f, b, c = tuple(forward_seconds), tuple(backward_seconds), (*transfer_seconds, 0.0)
    w = tuple(weight_seconds) if schedule in SPLIT else (0.0,) * len(f)
    p = len(f) // virtual_stages
    ranks = [rank_of_chunk(schedule, p, chunk) for chunk in range(len(f))]
    lies = [c[i] if ranks[i] != ranks[i + 1] else 0.0 for i in range(len(f) - 1)] + [0.0]
    up = [0.0, *accumulate(x + y for x, y in zip(f, lies, strict=True))]
    down = [0.0, *accumulate(x - z + y for x, z, y in zip(b, w, lies, strict=True))]
    floor = up[-1] + down[-1]
    for rank in range(p):
        own = [chunk for chunk in range(len(f)) if ranks[chunk] == rank]
        busy = num_microbatches * sum(f[i] + b[i] for i in own)
        later = num_microbatches * sum(w[i] for i in own)
        floor = max(floor, up[own[0]] + busy, up[own[0]] + busy - later + down[own[0]])
    return floor
