"""What a plan is estimated to cost, what was compared with it, and what the search did: the numbers that it carries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from galv.planner.layout import Frozen

Count = Annotated[int, Field(ge=1, le=2**62)]
# What is estimated has bounds only to be printable: a layout by hand may ask for the absurd.
Bytes = Annotated[int, Field(ge=0, le=10**60)]
Figure = Annotated[float, Field(ge=0, le=1e60, allow_inf_nan=False)]
Duration = Annotated[float, Field(gt=1e-60, le=1e60, allow_inf_nan=False)]
"""Seconds that are divided by."""


class TimeBreakdown(Frozen):
    """Where a step's seconds go on one stage; they sum to the step."""

    compute_seconds: Figure = 0.0
    """Forward, backward and recomputation."""
    communication_seconds: Figure = 0.0
    """Exposed only: what computation does not hide."""
    bubble_seconds: Figure = 0.0
    """Waiting for other stages."""
    optimizer_seconds: Figure = 0.0
    """Gradient clipping and the optimizer's update."""

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.bubble_seconds + self.optimizer_seconds


class MemoryBreakdown(Frozen):
    """Where one device's bytes go at the peak; they sum to the peak."""

    parameters_bytes: Bytes = 0
    gradients_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    activations_bytes: Bytes = 0
    working_bytes: Bytes = 0
    """Alive for the moment only: gathered parameters, recomputed activations, logits, gradients in flight."""
    reserved_bytes: Bytes = 0
    """Not the model's: context, communication buffers, allocator slack."""
    context_bytes: Bytes = 0
    """Of `reserved_bytes`, what torch's allocator does not count."""

    @property
    def allocated_bytes(self) -> int:
        """What the tensors take, as torch.cuda.max_memory_allocated() says."""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.working_bytes

    @property
    def cached_bytes(self) -> int:
        """What the allocator has taken for them, as torch.cuda.max_memory_reserved() says."""
        return self.total_bytes - self.context_bytes

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes + self.reserved_bytes


class UnitEstimate(Frozen):
    """One unit's part of a step, all microbatches together, on one device."""

    compute_seconds: Figure
    communication_seconds: Figure
    state_bytes: Bytes
    """Parameters, gradients and optimizer state."""
    activations_bytes: Bytes
    """All microbatches in flight at the peak."""


class StageEstimate(Frozen):
    time: TimeBreakdown
    memory: MemoryBreakdown
    units: tuple[UnitEstimate, ...]
    """In the order of the stage's units."""
    num_in_flight: Count = 1
    """Microbatches whose activations are alive at the peak."""
    forward_seconds: Figure = 0.0
    """Busy with one microbatch; so `backward_seconds`, and `step_seconds` once a step after them."""
    backward_seconds: Figure = 0.0
    step_seconds: Figure = 0.0
    weight_seconds: Figure = 0.0
    """The part of `backward_seconds` that makes weight gradients and can run later."""


class Estimate(Frozen):
    """What a step is predicted to cost."""

    step_seconds: Duration
    tokens_per_second: Figure
    """Samples per second where a sample has no tokens."""
    mfu: Figure
    """Model FLOPs over what the devices could do at their peak rate."""
    model_flops: Figure
    """Forward and backward of one global batch: matrix products once forward and twice backward, attention with all its
    scores, nothing recomputed."""
    peak_bytes: tuple[Bytes, ...]
    """One a stage: its fullest device."""
    fits: bool
    breakdown: TimeBreakdown
    """The mean over all devices."""
    stages: tuple[StageEstimate, ...]
    transfer_seconds: Figure = 0.0
    uncertainty: float = Field(0.0, ge=0, le=1e6)
    """What `step_seconds` may be off to either side because the readings behind it vary, as a share of it; 0 where
    nothing was measured."""


class Alternative(Frozen):
    """A simple layout that people choose by habit, priced beside the plan."""

    name: str
    layout: str
    """In words; empty when no such layout exists here."""
    step_seconds: Duration | None
    """None when it does not fit or does not exist."""
    reason: str
    """Why not, when `step_seconds` is None."""


class SearchReport(Frozen):
    """What the search did."""

    seconds: Figure
    candidates: int = Field(ge=0, le=2**62)
    """Layouts priced."""
    proven_optimal: bool
    gap: float = Field(ge=0, le=1)
    """At most this share of the step time could still be saved within the searched space; 0 when proven."""
    pruned: tuple[tuple[str, int], ...] = ()
    """Why candidates gave no plan, and how many."""
    is_time_limited: bool = False
    """Whether the search ended because its time was up."""
    objective: Literal["throughput", "memory", "cost"] = "throughput"
    """What the plan is best in."""
    demands: tuple[str, ...] = ()
    """What the user demanded of it, each as on the command line."""
