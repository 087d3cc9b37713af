"""The captured model as data: units, unit classes, and the facts of every operator. No torch here.

`planner.capture` fills these in; cost models and the search read them. A unit class is captured once for every
(tensor-parallel layout, microbatch) that is asked for; `UnitFacts` holds what one such trace saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from galv.planner.plan import (
    ContextMode,
    ExpertLayout,
    InputSpec,
    SequenceLayout,
    SequenceMode,
    TensorParallelLayout,
)

OperatorKind = Literal["matmul", "attention", "memory", "view", "collective"]
Phase = Literal["forward", "backward"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]
Axis = Literal["tensor", "context", "expert"]
"""The axes of a unit's devices that its own operators communicate over; the data axes are the cost models' to add."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One aten call as eager training dispatches it, on one rank.

    `kind` is how its time is found: matrix products and fused attention by FLOPs, `memory` by bytes moved, `view` is
    free, `collective` by bytes and group. `bytes_read` counts every input once, `bytes_written` every fresh output.
    """

    name: str
    """Overload name, such as `aten.mm.default`."""
    kind: OperatorKind
    phase: Phase
    module: str
    """Module within the unit that called it; empty when unknown (most of backward)."""
    dtype: str
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    matmul: tuple[float, float, float, float] | None = None
    """(batch, m, n, k) of a matrix product."""
    attention: tuple[float, float, float, float, float, bool] | None = None
    """(batch, heads, query length, key length, head dim, causal) of a fused attention kernel."""
    collective: CollectiveKind | None = None
    """For `collective`: `bytes_read` is the full tensor (see `cost_models.communication`). The steps of a ring are a
    `p2p` each, one message of keys and values, beside the attention of the same phase."""
    axis: Axis = "tensor"
    """For `collective`: the axis that it goes over."""
    is_weight_gradient: bool = False
    """Whether it is a matrix product in backward that makes a parameter's gradient: nothing waits for it."""


@dataclass(frozen=True)
class UnitFacts:
    """What one rank does and keeps for one unit, one microbatch, under one tensor-parallel layout. Bytes, FLOPs."""

    operators: tuple[Operator, ...]
    """Forward, then backward, in the order of execution; collectives of tensor, context and expert axes included."""
    saved_bytes: float
    """Kept from forward to backward beyond parameters and the unit's own inputs, each storage once."""
    saved_selective_bytes: float
    """The same under selective recompute: outputs of matrix products and attention."""
    input_bytes: float
    """The unit's differentiable input from the unit before (what full recompute keeps)."""
    output_bytes: float
    """The output to the next unit (what a pipeline sends)."""
    forward_peak_bytes: float
    """Most bytes alive at once inside forward, beyond parameters and inputs, saved ones included."""
    backward_peak_bytes: float
    """Most bytes alive at once inside backward, beyond parameters, their gradients and what forward saved."""
    input_is_saved: bool = True
    """Whether the unit itself keeps its input for backward; where not, only recomputation does."""
    num_recomputed: int | None = None
    """How many operators of forward run before the last tensor is kept for backward: recomputation ends there. None:
    all."""

    def phase(self, phase: Phase) -> tuple[Operator, ...]:
        """The operators of one direction, in order."""
        return tuple(op for op in self.operators if op.phase == phase)

    @cached_property
    def forward_flops(self) -> float:
        return sum(op.flops for op in self.operators if op.phase == "forward")

    @cached_property
    def backward_flops(self) -> float:
        return sum(op.flops for op in self.operators if op.phase == "backward")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a unit class, named within the unit."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    is_expert: bool = False
    """Whether its first dim counts experts, which expert parallelism shares out."""

    @property
    def numel(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class UnitClass:
    """Units with the same graph and shapes."""

    name: str
    parameters: tuple[Parameter, ...]
    """Named within the unit, see `plan.absolute_name`."""
    is_opaque: bool = False
    """Whether it was not traced: what it computes was counted in one run with made-up values."""
    experts: int = 0
    """Experts of a mixture-of-experts block; 0 for all other units."""

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class UnitRef:
    """A unit of the model and the modules that hold its parameters."""

    name: str
    unit_class: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Fully qualified names of parameters that it holds beside its modules: those that lie directly in a module around
    several units."""


@dataclass(frozen=True)
class Edge:
    """A tensor that one unit makes and later units take. One taken by several is carried along to the last of them."""

    producer: int
    """Position among the units."""
    consumers: tuple[int, ...]
    """Positions, ascending, all after `producer`."""
    bytes_per_sample: float
    fixed_bytes: float = 0.0
    """Of a tensor that is the same for any number of samples."""

    def num_bytes(self, microbatch: int) -> float:
        """Its bytes for `microbatch` samples."""
        return self.fixed_bytes + microbatch * self.bytes_per_sample

    def crosses(self, border: int) -> bool:
        """Whether a cut in front of unit `border` has it sent."""
        return self.producer < border <= self.consumers[-1]


@dataclass(frozen=True)
class Exclusion:
    """Why a strategy does not exist for a unit class."""

    reason: str


class FactsSource(Protocol):
    """Where facts come from: the tracer, or a fixed table in tests."""

    def facts(
        self,
        unit_class: str,
        layout: TensorParallelLayout | None,
        microbatch: int,
        *,
        sequence: SequenceLayout | None = None,
        ep: int = 1,
    ) -> UnitFacts:
        """The facts of `unit_class` for `microbatch` samples on one rank; `layout` None means tp 1.

        `sequence`: on one of `degree` ranks that share the sequence, all bytes those of this rank; None means cp 1.
        `ep`: on one of `ep` ranks that share the experts and exchange their tokens, evenly routed.
        """
        ...

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        """The placements found for a tensor-parallel degree, or why there are none."""
        ...

    def sequence_layout(
        self, unit_class: str, mode: ContextMode, degree: int, *, tp: int = 1
    ) -> SequenceLayout | Exclusion:
        """The cut of the sequence over `degree` ranks, each with a tensor axis of `tp`, or why there is none."""
        ...

    def expert_exclusion(self, unit_class: str, degree: int, *, tp: int = 1) -> Exclusion | None:
        """Why the experts cannot be shared out over `degree` ranks; None where they can."""
        ...

    def expert_layout(self, unit_class: str) -> ExpertLayout | Exclusion:
        """Where the experts of a unit class are, or why it has none to share out."""
        ...


@dataclass(frozen=True)
class ModelGraph:
    """The units of a model in the order of execution, what flows between them, and the facts to price them."""

    name: str
    units: tuple[UnitRef, ...]
    """In the order of execution."""
    classes: dict[str, UnitClass]
    inputs: tuple[InputSpec, ...]
    num_samples: int
    """Samples in `inputs`."""
    num_parameters: int
    """Tied parameters once."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one tensor."""
    fingerprint: str
    source: FactsSource = field(compare=False, repr=False)
    edges: tuple[Edge, ...] = ()
    """By producer. What the model's inputs alone determine (masks, position ids) flows nowhere: each stage makes it."""
    no_pipeline: str | None = None
    """Why the model cannot be cut into pipeline stages; None when it can."""
    notes: tuple[str, ...] = ()
    """What a person should know about how the model was taken apart."""

    def crossing_bytes(self, border: int, microbatch: int) -> float:
        """Bytes that a pipeline cut in front of unit `border` sends for `microbatch` samples, nothing sharded."""
        return sum(edge.num_bytes(microbatch) for edge in self.edges if edge.crosses(border))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Units of each class."""
        counts: dict[str, int] = dict.fromkeys(self.classes, 0)
        for unit in self.units:
            counts[unit.unit_class] += 1
        return counts

    @cached_property
    def tied_units(self) -> tuple[frozenset[int], ...]:
        """For each tied group that spans units, the positions of those units."""
        owners = []
        for group in self.tied:
            members = {i for i, unit in enumerate(self.units) for name in group if _owns(unit, name)}
            if len(members) > 1:
                owners.append(frozenset(members))
        return tuple(owners)


def _owns(unit: UnitRef, parameter: str) -> bool:
    if parameter in unit.parameters:
        return True
    return any(parameter.startswith(f"{module}.") or not module for module in unit.modules)
