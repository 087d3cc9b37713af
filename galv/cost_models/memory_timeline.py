"""What one device holds over a step, moment by moment: the moments' maximum is the peak that an estimate gives.

    states         masters, kept copies and optimizer state lie there throughout; a unit's gradients from its first
                   backward on
    activations    rise by one unit's share with every forward of a microbatch and fall with its backward; where a
                   schedule puts weight gradients off, their factors stay until they are made
    working        only while a unit runs: temporaries of its operators (logits and loss among them), what is computed
                   again, its gathered parameters with those on their way, gradients in the making and being reduced

A unit's backward has three full moments: while it computes, beside what is being reduced of the unit after it; when its
activations have gone and its gradients are whole; and when its parameters have gone and the gradients are reduced. The
last backward frees kept copies of parameters unit by unit.

The update adds nothing: galv's runtime runs the fused AdamW, which writes in place, and SGD's multi-tensor kernels
form no temporary as large as a gradient without weight decay.

A search adds up states, the activations of all microbatches in flight and the largest working bytes instead. That is
never less than the maximum here, where units are divided as their neighbours are. It is close where the units that work
with most bytes stand last in their stage, and gradients are there already when most microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from galv.cost_models.makespan import least_microbatches
from galv.cost_models.memory import Passing
from galv.cost_models.unit import UnitCost, WorkingBytes
from galv.planner.plan import Pipeline
from galv.schedules import SPLIT, Kind, orders_of

MomentKind = Literal["forward", "backward", "input", "weight", "update"]
Stages = Sequence[Sequence[UnitCost]]
"""The units of each stage (model chunk) of one pipeline rank, in the order of the model."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """An operation of a rank: what it does, and what is there when it begins. Counts run over the rank's stages."""

    kind: MomentKind
    stage: int
    """Of the rank: 0 for its first."""
    microbatch: int
    whole: tuple[int, ...]
    """Microbatches whose activations are there, the operation's own not counted."""
    factors: tuple[int, ...]
    """Microbatches of which only weight gradients are to be made, the operation's own not counted."""
    formed: tuple[bool, ...]
    """Whether some backward has made gradients."""
    done: tuple[bool, ...] = ()
    """Whether the last backward has run, and freed what was kept for the step."""
    is_first: bool = False
    """Whether it is the step's first microbatch; so `is_last`."""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """What one device holds while one unit works on one microbatch. Bytes; the allocator's and the context left out."""

    kind: MomentKind
    microbatch: int
    unit: int | None
    """Position among the rank's units; None for the update."""
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float

    @property
    def total_bytes(self) -> float:
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.working_bytes


def memory_timeline(stages: Stages, pipeline: Pipeline, rank: int, num_microbatches: int) -> tuple[MemoryPoint, ...]:
    """Every point of a step of one pipeline rank, in order. The parts of its units' working bytes must be known."""
    return tuple(_points(stages, _moments(pipeline, rank, num_microbatches)))


def memory_peak(stages: Stages, pipeline: Pipeline, rank: int, num_microbatches: int) -> MemoryPoint:
    """The point of `memory_timeline` that holds most. Moments that hold alike are looked at once."""
    return max(_points(stages, _distinct_moments(pipeline, rank, num_microbatches)), key=lambda p: p.total_bytes)


def summed_peak(costs: Sequence[UnitCost], in_flight: float) -> MemoryPoint:
    """What a search takes for the peak: everything that is ever there together with the largest working bytes."""
    unit = max(range(len(costs)), key=lambda i: costs[i].working_bytes)
    return MemoryPoint(
        "backward",
        0,
        unit,
        parameters_bytes=sum(cost.states.parameters_bytes for cost in costs),
        gradients_bytes=sum(cost.states.gradients_bytes for cost in costs),
        optimizer_bytes=sum(cost.states.optimizer_bytes for cost in costs),
        activations_bytes=in_flight * sum(cost.activation_bytes for cost in costs),
        working_bytes=costs[unit].working_bytes,
    )


# ----------------------------------------------------------------------------------------------- moments

_CHANGES: dict[Kind, tuple[int, int, int, int]] = {
    "forward": (0, 0, 1, 0),
    "backward": (-1, 0, 0, 0),
    "input": (-1, 0, 0, 1),
    "weight": (0, -1, 0, 0),
}
"""Of each operation: what its begin and its end add to (whole, factors), begin first."""


def _moments(pipeline: Pipeline, rank: int, num_microbatches: int) -> Iterator[_Moment]:
    """The operations of a rank in order, and the update."""
    held = pipeline.stages_of_rank(rank)
    whole, factors, formed, left = [0] * len(held), [0] * len(held), [False] * len(held), [num_microbatches] * len(held)
    ends = "weight" if pipeline.schedule in SPLIT else "backward"
    for kind, chunk, microbatch in orders_of(pipeline, num_microbatches).ranks[rank]:
        stage = held.index(chunk)
        before = _CHANGES[kind]
        whole[stage], factors[stage] = whole[stage] + before[0], factors[stage] + before[1]
        done = tuple(n == 0 for n in left)
        last = microbatch == num_microbatches - 1
        counts = tuple(whole), tuple(factors), tuple(formed), done
        yield _Moment(kind, stage, microbatch, *counts, is_first=microbatch == 0, is_last=last)
        left[stage] -= kind == ends
        whole[stage], factors[stage] = whole[stage] + before[2], factors[stage] + before[3]
        formed[stage] = formed[stage] or kind != "forward"
    none = (0,) * len(held)
    yield _Moment("update", 0, num_microbatches - 1, none, none, (True,) * len(held), (True,) * len(held))


@lru_cache(maxsize=4096)
def _distinct_moments(pipeline: Pipeline, rank: int, num_microbatches: int) -> tuple[_Moment, ...]:
    """Of the moments of a step those that differ in more than the microbatch and than holding less."""
    gpipe = pipeline.schedule == "gpipe"
    rounds = (
        min(num_microbatches, 3) if gpipe else least_microbatches(pipeline.schedule, pipeline.degree, num_microbatches)
    )
    over = num_microbatches - rounds if gpipe else 0  # that many more are in flight when most are
    fullest: dict[tuple[object, ...], list[_Moment]] = {}
    for moment in _moments(pipeline, rank, rounds):
        key = (moment.kind, moment.stage, moment.formed, moment.done, moment.is_first, moment.is_last)
        fullest.setdefault(key, []).append(moment)
    found = [kept for same in fullest.values() for kept in _fullest(same)]
    return tuple(
        replace(moment, whole=tuple(n + over for n in moment.whole)) if moment.kind != "update" else moment
        for moment in found
    )


def _fullest(moments: Sequence[_Moment]) -> list[_Moment]:
    """Those that no other exceeds in every count; of equal ones the first."""
    counts = {(*m.whole, *m.factors): m for m in reversed(moments)}
    return [
        moment
        for mine, moment in counts.items()
        if not any(other != mine and all(x >= y for x, y in zip(other, mine, strict=True)) for other in counts)
    ]


# ----------------------------------------------------------------------------------------------- points


def _points(stages: Stages, moments: Iterable[_Moment]) -> Iterator[MemoryPoint]:
    flat = [cost for stage in stages for cost in stage]
    optimizer = sum(cost.states.optimizer_bytes for cost in flat)
    masters = sum(cost.states.parameters_bytes - _passing(cost).copy_bytes for cost in flat)
    starts = list(accumulate((len(stage) for stage in stages), initial=0))
    held = [_Held(stage) for stage in stages]
    for moment in moments:
        others = sum(n * each.activations[-1] for n, each in zip(moment.whole, held, strict=True))
        others += sum(n * each.factors[-1] for n, each in zip(moment.factors, held, strict=True))
        gradients = sum(each.gradients[0] for each, there in zip(held, moment.formed, strict=True) if there)
        gradients -= sum(each.reduced[0] for each, ended in zip(held, moment.done, strict=True) if ended)
        copies = sum(each.copies[-1] for each, gone in zip(held, moment.done, strict=True) if not gone)
        if moment.kind == "update":
            yield MemoryPoint("update", moment.microbatch, None, masters + copies, gradients, optimizer, 0.0, 0.0)
            continue
        own, forward = held[moment.stage], moment.kind == "forward"
        for unit in range(len(own.costs)) if forward else range(len(own.costs) - 1, -1, -1):
            at = [own.forward(unit, moment)] if forward else own.backward(unit, moment)
            yield max(
                (
                    MemoryPoint(
                        moment.kind,
                        moment.microbatch,
                        starts[moment.stage] + unit,
                        masters + copies + now.copies,
                        gradients + now.gradients,
                        optimizer,
                        others + now.activations,
                        now.working,
                    )
                    for now in at
                ),
                key=lambda point: point.total_bytes,
            )


class _Now(NamedTuple):
    """What an operation changes of what is there, in bytes."""

    activations: float
    working: float
    gradients: float = 0.0
    copies: float = 0.0


class _Held:
    """What the units of one stage hold: entry i of a list is for those before unit i, or for those from unit i on."""

    def __init__(self, costs: Sequence[UnitCost]) -> None:
        self.costs, self.passing = costs, [_passing(cost) for cost in costs]
        self.activations = list(accumulate((cost.activation_bytes for cost in costs), initial=0.0))
        self.factors = list(accumulate((cost.factor_bytes for cost in costs), initial=0.0))
        self.copies = list(accumulate((own.copy_bytes for own in self.passing), initial=0.0))
        self.gradients = _from_each_on([own.gradients_bytes for own in self.passing])
        shrinks = (own.gradients_bytes - own.output_bytes if own.accumulates else 0.0 for own in self.passing)
        self.reduced = _from_each_on(list(shrinks))
        """By how much gradients that were kept whole shrink when they are reduced in the end."""

    def forward(self, unit: int, moment: _Moment) -> _Now:
        """Gathered parameters stay in the buffer that they came in until the next unit's come."""
        working, own = _working(self.costs[unit]), self.passing[unit]
        window = own.buffer_bytes if moment.is_first or own.gathered_bytes else 0.0
        window += 0.0 if working.loss_is_apart else own.gathered_bytes
        return _Now(self.activations[unit + 1], working.forward_bytes + window)

    def backward(self, unit: int, moment: _Moment) -> list[_Now]:
        """While the unit computes; when its gradients are whole; and when they are reduced."""
        working, own = _working(self.costs[unit]), self.passing[unit]
        ends = moment.is_last and moment.kind != "input"
        first = not moment.formed[moment.stage]
        before = self.passing[unit - 1].gathered_bytes if unit else 0.0
        kept = self.factors if moment.kind == "weight" else self.activations
        computed = _Now(
            kept[unit + 1],
            0.0 if moment.kind == "weight" else working.backward_bytes,
            (self.gradients[unit + 1] if first else 0.0) - (self.reduced[unit + 1] if ends else 0.0),
            self.copies[unit + 1] - self.copies[-1] if ends else 0.0,
        )
        window = own.gathered_bytes + before + self._being_reduced(unit + 1, moment)
        beside = 0.0 if working.loss_is_apart else window
        running = computed._replace(working=computed.working + beside)
        if moment.kind == "input":
            return [running]
        return [
            running,
            computed._replace(activations=kept[unit], working=window + own.fresh_bytes),
            computed._replace(
                activations=kept[unit],
                working=before + _made_bytes(own, ends),
                gradients=computed.gradients + (own.gradients_bytes if first and own.accumulates else 0.0),
                copies=self.copies[unit] - self.copies[-1] if ends else 0.0,
            ),
        ]

    def _being_reduced(self, unit: int, moment: _Moment) -> float:
        """What the reduction of a unit, whose backward has just run, still holds."""
        if unit == len(self.passing) or moment.kind == "input":
            return 0.0
        own = self.passing[unit]
        return own.input_bytes if moment.is_last or not own.accumulates else 0.0


def _from_each_on(values: Sequence[float]) -> list[float]:
    """The sums of the values from each place on, and 0 behind the last."""
    return list(accumulate(reversed(values), initial=0.0))[::-1]


def _made_bytes(own: Passing, ends: bool) -> float:
    """What gradients that a backward has just made take, beside those that are kept."""
    if own.accumulates:
        return max(own.fresh_bytes, own.input_bytes) if ends else own.fresh_bytes
    return own.fresh_bytes + own.input_bytes + own.output_bytes


def _working(cost: UnitCost) -> WorkingBytes:
    assert cost.working is not None, "only galv's own runtime is known so well"
    return cost.working


def _passing(cost: UnitCost) -> Passing:
    return _working(cost).passing
