"""Pipeline schedules as orders of operations: what each pipeline rank runs, one after the other.

The runtime runs these orders and the cost models time them, so what is priced is what runs. A pipeline rank holds one
or more chunks of the model, numbered along it. An operation is the forward of a chunk for a microbatch, its whole
backward, or, where a schedule splits it, the part of backward that makes the input's gradient (`input`) and the part
that makes the weights' (`weight`).

Orders: GPipe (Huang et al., arXiv 1811.06965); 1F1B (Narayanan et al., arXiv 2104.04473, PipeDream-Flush); interleaved
1F1B (the same paper), where rank r of p holds the chunks r, r + p, ...; ZB-H1 (Qi et al., arXiv 2401.10241) and ZBV
(Qi et al., arXiv 2405.15362), where backward is split and, in ZBV, rank r holds the chunks r and 2p - 1 - r.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from galv.planner.plan import Pipeline, ScheduleName

Kind = Literal["forward", "backward", "input", "weight"]

SPLIT: frozenset[ScheduleName] = frozenset({"zb-h1", "zbv"})
"""Schedules that split backward."""


class Operation(NamedTuple):
    """One piece of work of one rank."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What each rank runs, in order."""

    name: ScheduleName
    ranks: tuple[tuple[Operation, ...], ...]
    num_chunks: int

    def rank_of(self, chunk: int) -> int:
        """The rank that holds `chunk`."""
        return rank_of_chunk(self.name, len(self.ranks), chunk)

    def needs(self, operation: Operation) -> Iterator[Operation]:
        """The operations that must have run before, those of this chunk first."""
        kind, chunk, microbatch = operation
        if kind == "forward":
            if chunk:
                yield Operation(kind, chunk - 1, microbatch)
        elif kind == "weight":
            yield Operation("input", chunk, microbatch)
        else:
            yield Operation("forward", chunk, microbatch)
            if chunk + 1 < self.num_chunks:
                yield Operation(kind, chunk + 1, microbatch)


def rank_of_chunk(schedule: ScheduleName, num_ranks: int, chunk: int) -> int:
    """The pipeline rank that holds a chunk of the model: chunks go round, under `zbv` they come back."""
    if schedule == "zbv" and chunk >= num_ranks:
        return 2 * num_ranks - 1 - chunk
    return chunk % num_ranks


def executed_schedule(schedule: ScheduleName, num_stages: int, num_microbatches: int) -> ScheduleName:
    """What really runs: with fewer microbatches than stages 1F1B never comes to alternate and is GPipe."""
    return "gpipe" if schedule == "1f1b" and num_microbatches < num_stages else schedule


def orders_of(pipeline: Pipeline, num_microbatches: int) -> Orders:
    """The orders of a plan's pipeline."""
    return orders(pipeline.schedule, pipeline.degree, num_microbatches, pipeline.virtual_stages)


@lru_cache(maxsize=256)
def orders(schedule: ScheduleName, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """What the ranks run under `schedule`: with several chunks on a rank interleaved, with two `zbv`."""
    p, m, v = num_ranks, num_microbatches, virtual_stages
    assert (v > 1) == (schedule in ("interleaved", "zbv")), f"{schedule} with {v} chunks on a rank"
    if schedule == "zbv":
        return Orders(schedule, _zero_bubble_v(p, m), 2 * p)
    if schedule == "interleaved":
        return Orders(schedule, tuple(tuple(_interleaved(rank, p, m, v)) for rank in range(p)), p * v)
    if schedule == "zb-h1":
        return Orders(schedule, tuple(tuple(_zero_bubble_h1(rank, p, m)) for rank in range(p)), p)
    plain = tuple(tuple(Operation(kind, s, i) for kind, i in stage_order(schedule, s, p, m)) for s in range(p))
    return Orders(schedule, plain, p)


# ----------------------------------------------------------------------------------------------- one chunk a rank


def stage_order(
    schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int
) -> list[tuple[Literal["forward", "backward"], int]]:
    """The (phase, microbatch) that `stage` runs under GPipe, 1F1B or on one stage, in order."""
    schedule = executed_schedule(schedule, num_stages, num_microbatches)
    ahead = {"none": 1, "gpipe": num_microbatches}.get(schedule, num_stages - stage)
    order: list[tuple[Literal["forward", "backward"], int]] = [("forward", i) for i in range(ahead)]
    for i in range(num_microbatches):
        order.append(("backward", i))
        if i + ahead < num_microbatches:
            order.append(("forward", i + ahead))
    return order


def _zero_bubble_h1(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Operation]:
    """ZB-H1: 1F1B whose rank r puts weight parts off by r microbatches, so that input parts travel sooner.

    Every rank holds at most p activations, as the first rank of 1F1B does.
    """
    m, ahead = num_microbatches, min(num_ranks - rank, num_microbatches)
    yield from (Operation("forward", rank, i) for i in range(ahead))
    for i in range(m):
        yield Operation("input", rank, i)
        if i >= rank:
            yield Operation("weight", rank, i - rank)
        if i + ahead < m:
            yield Operation("forward", rank, i + ahead)
    yield from (Operation("weight", rank, i) for i in range(max(m - rank, 0), m))


# ----------------------------------------------------------------------------------------------- several chunks


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int) -> Iterator[Operation]:
    """Interleaved 1F1B: microbatches go through a rank's chunks in groups; ranks run some forwards ahead."""
    p, v = num_ranks, virtual_stages
    groups = list(_groups(p, num_microbatches))
    forwards = [(chunk, i) for group in groups for chunk in range(v) for i in group]
    backwards = [(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]
    ahead = min(2 * (p - rank - 1) + (v - 1) * len(groups[0]) + 1, len(forwards))
    yield from (Operation("forward", c * p + rank, i) for c, i in forwards[:ahead])
    for k, (c, i) in enumerate(backwards):
        yield Operation("backward", c * p + rank, i)
        if k + ahead < len(forwards):
            c, i = forwards[k + ahead]
            yield Operation("forward", c * p + rank, i)


def _groups(num_ranks: int, num_microbatches: int) -> Iterator[range]:
    """Microbatches in groups of as many as there are ranks. What is over makes the first groups longer.

    (Megatron-LM asks that nothing is over. A shorter group at the end would have ranks wait for each other in a ring.)
    """
    number = max(num_microbatches // num_ranks, 1)
    size, more = divmod(num_microbatches, number)
    start = 0
    for k in range(number):
        stop = start + size + (k < more)
        yield range(start, stop)
        start = stop


def _zero_bubble_v(num_ranks: int, num_microbatches: int) -> tuple[tuple[Operation, ...], ...]:
    """ZBV, found by running its rule with equal times for forward, input and weight parts.

    A free rank runs the input part of a backward that is ready, else a forward while it may hold another activation,
    else a weight part. Every rank holds at most 2 p activations of half its units, what 1F1B's first rank holds.
    """
    rule = _Rule(num_ranks, num_microbatches)
    clock = [(0, rank) for rank in range(num_ranks)]
    while clock:
        now, rank = heapq.heappop(clock)
        if rule.run(rank, now) or rule.has_work(rank):
            heapq.heappush(clock, (now + 1, rank))
    return tuple(tuple(order) for order in rule.orders)


class _Rule:
    """The state of the ranks while ZBV's rule is run. Each operation takes one tick."""

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self._num_microbatches, self._most_held = num_microbatches, 2 * num_ranks
        self._shape = Orders("zbv", ((),) * num_ranks, 2 * num_ranks)
        kinds: tuple[Kind, ...] = ("input", "forward", "weight")
        self._next = [
            {(kind, chunk): 0 for kind in kinds for chunk in (2 * num_ranks - 1 - rank, rank)}
            for rank in range(num_ranks)
        ]
        """The microbatch that comes next, of each kind and chunk."""
        self._ended: dict[Operation, int] = {}
        self._held = [0] * num_ranks
        self.orders: list[list[Operation]] = [[] for _ in range(num_ranks)]

    def has_work(self, rank: int) -> bool:
        """Whether a rank has not run everything."""
        return any(i < self._num_microbatches for i in self._next[rank].values())

    def run(self, rank: int, now: int) -> bool:
        """Runs what the rule chooses for a free rank at a tick; whether anything was ready."""
        ready = [op for op in self._candidates(rank) if self._is_ready(op, now)]
        if not ready:
            return False
        urgency = {"input": 0, "forward": 1, "weight": 2}
        chosen = min(ready, key=lambda op: (urgency[op.kind], op.microbatch, -op.chunk))
        self._next[rank][chosen.kind, chosen.chunk] += 1
        self._ended[chosen] = now + 1
        self._held[rank] += {"forward": 1, "weight": -1}.get(chosen.kind, 0)
        self.orders[rank].append(chosen)
        return True

    def _candidates(self, rank: int) -> Iterator[Operation]:
        for (kind, chunk), microbatch in self._next[rank].items():
            if microbatch < self._num_microbatches and (kind != "forward" or self._held[rank] < self._most_held):
                yield Operation(kind, chunk, microbatch)

    def _is_ready(self, operation: Operation, now: int) -> bool:
        return all(self._ended.get(needed, now + 1) <= now for needed in self._shape.needs(operation))
