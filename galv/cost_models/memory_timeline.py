"""What one device holds over a step, moment by moment: the moments' maximum is the peak that an estimate gives.

    states         masters, kept copies and optimizer state lie there throughout; a unit's gradients from its first
                   backward on
    activations    rise by one unit's share with every forward of a microbatch and fall with its backward
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
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from galv.cost_models.pipeline import stage_order
from galv.cost_models.unit import UnitCost, WorkingBytes
from galv.planner.plan import ScheduleName

Phase = Literal["forward", "backward", "update"]


class Moment(NamedTuple):
    """An operation of a stage: what it does, and what is there when it begins."""

    phase: Phase
    microbatch: int
    in_flight: int
    """Microbatches whose activations are there, this one not counted."""
    is_first: bool
    """Whether no backward has run before."""


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """What one device holds while one unit works on one microbatch. Bytes; the allocator's and the context left out."""

    phase: Phase
    microbatch: int
    unit: int | None
    """Position in the stage; None for the update."""
    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float

    @property
    def total_bytes(self) -> float:
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.working_bytes
        )


def memory_timeline(
    costs: Sequence[UnitCost], *, schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int
) -> tuple[MemoryPoint, ...]:
    """Every point of a step of one stage, whose units cost `costs` in order. Needs the parts of their working bytes."""
    return tuple(_points(costs, _moments(schedule, stage, num_stages, num_microbatches)))


def memory_peak(
    costs: Sequence[UnitCost], *, schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int
) -> MemoryPoint:
    """The point of `memory_timeline` that holds most. O(units): equal moments are looked at once."""
    moments = _distinct_moments(schedule, stage, num_stages, num_microbatches)
    return max(_points(costs, moments), key=lambda point: point.total_bytes)


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


def _moments(schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> Iterator[Moment]:
    """The operations of a stage in order, and the update."""
    in_flight, is_first = 0, True
    for phase, microbatch in stage_order(schedule, stage, num_stages, num_microbatches):
        in_flight -= phase == "backward"
        yield Moment(phase, microbatch, in_flight, is_first)
        in_flight += phase == "forward"
        is_first = is_first and phase == "forward"
    yield Moment("update", num_microbatches - 1, 0, is_first=False)


@lru_cache(maxsize=4096)
def _distinct_moments(schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> tuple[Moment, ...]:
    """Of moments that differ in the microbatch or in how much is in flight, the fullest."""
    fullest: dict[tuple[Phase, bool], Moment] = {}
    # A schedule repeats itself once it alternates: a few more microbatches than stages show all that it does.
    rounds = num_microbatches if schedule in ("none", "gpipe") else min(num_microbatches, 2 * num_stages + 2)
    rounds = min(rounds, 3) if schedule == "none" else rounds
    for moment in _moments(schedule, stage, num_stages, rounds):
        key = (moment.phase, moment.is_first)
        if key not in fullest or moment.in_flight > fullest[key].in_flight:
            fullest[key] = moment
    return tuple(fullest.values())


# ----------------------------------------------------------------------------------------------- points


def _points(costs: Sequence[UnitCost], moments: Iterable[Moment]) -> Iterator[MemoryPoint]:
    parameters = sum(cost.states.parameters_bytes for cost in costs)
    optimizer = sum(cost.states.optimizer_bytes for cost in costs)
    upto = list(accumulate(cost.activation_bytes for cost in costs))
    formed = list(accumulate(cost.states.gradients_bytes for cost in reversed(costs)))[::-1]
    for moment in moments:
        if moment.phase == "update":
            yield MemoryPoint("update", moment.microbatch, None, parameters, formed[0], optimizer, 0.0, 0.0)
            continue
        order = range(len(costs)) if moment.phase == "forward" else range(len(costs) - 1, -1, -1)
        for unit in order:
            gradients: float = formed[0]
            if moment.is_first:
                gradients = formed[unit] if moment.phase == "backward" else 0.0
            yield MemoryPoint(
                moment.phase,
                moment.microbatch,
                unit,
                parameters,
                gradients,
                optimizer,
                moment.in_flight * upto[-1] + upto[unit],
                _working_bytes(costs[unit], moment.phase),
            )


def _working_bytes(cost: UnitCost, phase: Phase) -> float:
    """Forward holds up to three copies of gathered parameters, backward two (`memory.gather_window_bytes`)."""
    parts: WorkingBytes | None = cost.working
    assert parts is not None, "only galv's own runtime is known so well"
    if phase == "forward":
        return parts.forward_bytes + 3 * parts.gathered_bytes
    return parts.backward_bytes + 2 * parts.gathered_bytes + parts.reduction_bytes
