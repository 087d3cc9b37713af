"""What one device holds over a step, moment by moment: the moments' maximum is the peak that an estimate gives.

    states         masters, kept copies and optimizer state lie there throughout; a unit's gradients from its first
                   backward on
    activations    rise by one unit's share with every forward of a microbatch and fall with its backward; where a
                   schedule puts weight gradients off, their factors stay until they are made
    working        only while a unit runs: temporaries of its operators (logits and loss among them), what is computed
                   again, its gathered parameters with those on their way, gradients in the making and being reduced

The update adds nothing: galv's runtime runs the fused AdamW, which writes in place, and SGD's multi-tensor kernels
form no temporary as large as a gradient without weight decay.

A search adds up states, the activations of all microbatches in flight and the largest working bytes instead. That is
never less than the maximum here. It is equal where the units that work with most bytes stand last in their stage, and
where gradients are there already when most microbatches are in flight: on one stage, and under 1F1B but for the first
stage of as many microbatches as stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from galv.cost_models.makespan import least_microbatches
from galv.cost_models.unit import UnitCost
from galv.planner.plan import Pipeline
from galv.schedules import Kind, orders_of

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
    whole, factors, formed = [0] * len(held), [0] * len(held), [False] * len(held)
    for kind, chunk, microbatch in orders_of(pipeline, num_microbatches).ranks[rank]:
        stage = held.index(chunk)
        before = _CHANGES[kind]
        whole[stage], factors[stage] = whole[stage] + before[0], factors[stage] + before[1]
        yield _Moment(kind, stage, microbatch, tuple(whole), tuple(factors), tuple(formed))
        whole[stage], factors[stage] = whole[stage] + before[2], factors[stage] + before[3]
        formed[stage] = formed[stage] or kind != "forward"
    none = (0,) * len(held)
    yield _Moment("update", 0, num_microbatches - 1, none, none, (True,) * len(held))


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
        fullest.setdefault((moment.kind, moment.stage, moment.formed), []).append(moment)
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
    starts = list(accumulate((len(stage) for stage in stages), initial=0))
    parameters = sum(cost.states.parameters_bytes for cost in flat)
    optimizer = sum(cost.states.optimizer_bytes for cost in flat)
    upto = [list(accumulate(cost.activation_bytes for cost in stage)) for stage in stages]
    factors = [list(accumulate(cost.factor_bytes for cost in stage)) for stage in stages]
    formed = [list(accumulate(cost.states.gradients_bytes for cost in reversed(stage)))[::-1] for stage in stages]
    for moment in moments:
        gradients = sum(made[0] for made, is_there in zip(formed, moment.formed, strict=True) if is_there)
        others = sum(n * held[-1] for n, held in zip(moment.whole, upto, strict=True))
        others += sum(n * held[-1] for n, held in zip(moment.factors, factors, strict=True))
        if moment.kind == "update":
            yield MemoryPoint("update", moment.microbatch, None, parameters, gradients, optimizer, 0.0, 0.0)
            continue
        at, kind = moment.stage, moment.kind
        own, costs = factors[at] if kind == "weight" else upto[at], stages[at]
        for unit in range(len(costs)) if kind == "forward" else range(len(costs) - 1, -1, -1):
            forming = formed[at][unit] if kind != "forward" and not moment.formed[at] else 0.0
            yield MemoryPoint(
                kind,
                moment.microbatch,
                starts[at] + unit,
                parameters,
                gradients + forming,
                optimizer,
                others + own[unit],
                _working_bytes(costs[unit], kind),
            )


def _working_bytes(cost: UnitCost, kind: MomentKind) -> float:
    """Forward holds up to three copies of gathered parameters, backward two (`memory.gather_window_bytes`)."""
    parts = cost.working
    assert parts is not None, "only galv's own runtime is known so well"
    if kind == "forward":
        return parts.forward_bytes + 3 * parts.gathered_bytes
    temporaries = 0.0 if kind == "weight" else parts.backward_bytes
    return temporaries + 2 * parts.gathered_bytes + parts.reduction_bytes
