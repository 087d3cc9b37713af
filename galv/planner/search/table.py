"""The numbers a search works on: for every unit of the chain, its options. No torch, no model, no cluster here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from galv.cost_models.estimate import StageSeconds
from galv.planner.plan import ScheduleName, Strategy

Weights = tuple[float, float, float]
"""Of forward, backward and once-a-step seconds."""
Transitions = Mapping[tuple[int, int], tuple[float, float]]
"""(forward, backward) seconds per microbatch from one layout to another."""


@dataclass(frozen=True, slots=True)
class Option:
    """One strategy of one unit class and what it costs on one device. Seconds and bytes."""

    strategy: Strategy
    forward_seconds: float
    """Per microbatch, exposed communication included."""
    backward_seconds: float
    """Per microbatch, recomputation and exposed communication included."""
    step_seconds: float
    """Once a step: exposed gradient reduction, parameter gathering, clipping, the optimizer."""
    state_bytes: float
    """Parameters, gradients, optimizer state."""
    activation_bytes: float
    """Kept per microbatch in flight."""
    working_bytes: float
    """Alive only while this unit runs; a stage needs the largest of its units', not the sum."""
    layout: int = 0
    """How the activation lies on the stage's devices; `CostTable.transitions` says what a change costs."""
    weight_seconds: float = 0.0
    """The part of `backward_seconds` that makes weight gradients, which zero-bubble schedules run later."""

    def seconds(self, num_microbatches: int) -> float:
        """This unit's share of a stage's busy seconds in one step."""
        return num_microbatches * (self.forward_seconds + self.backward_seconds) + self.step_seconds

    def weighted(self, weights: Weights) -> float:
        """The sum of forward, backward and once-a-step seconds with these weights."""
        forward, backward, step = weights
        return forward * self.forward_seconds + backward * self.backward_seconds + step * self.step_seconds

    def held_bytes(self, in_flight: float) -> float:
        """Bytes held with `in_flight` microbatches alive."""
        return self.state_bytes + in_flight * self.activation_bytes


@dataclass(frozen=True)
class CostTable:
    """One outer choice (degrees, schedule, microbatches) and the options it leaves to each unit."""

    chain: tuple[str, ...]
    """The unit class at each position of the model."""
    options: Mapping[str, tuple[Option, ...]]
    num_stages: int
    num_microbatches: int
    schedule: ScheduleName
    transfer_seconds: float
    """One activation (or its gradient) from a stage to the next."""
    usable_bytes: float
    """What one device has for the model: the budget less context and allocator slack."""
    virtual_stages: int = 1
    """Model chunks of each pipeline rank."""
    transitions: Transitions = field(default_factory=dict)
    """(forward, backward) seconds per microbatch, paid by the later unit where its layout differs from that of the unit
    before; pairs that are not listed cannot stand next to each other. Equal layouts cost nothing."""


@dataclass(frozen=True)
class StageChoice:
    """The options chosen for the units of one stage: for each run of a class in order, its options and how many take
    each.

    Where layouts cost nothing, units of a class may stand in one run although others lie between them.
    """

    picks: tuple[tuple[str, tuple[tuple[Option, int], ...]], ...]
    busy: StageSeconds
    peak_bytes: float

    @property
    def last(self) -> Option:
        """The option of the last unit."""
        return self.picks[-1][1][-1][0]

    def units(self) -> Iterator[tuple[str, Option]]:
        """The class and option of every unit, run by run."""
        return ((name, option) for name, picks in self.picks for option, count in picks for _ in range(count))

    def ordered(self, names: Sequence[str]) -> tuple[Option, ...]:
        """One option for each unit of `names` (classes in model order); equal options of a class stand together."""
        queues: dict[str, list[Option]] = {}
        for name, option in self.units():
            queues.setdefault(name, []).append(option)
        return tuple(queues[name].pop(0) for name in names)
