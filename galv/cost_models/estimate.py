"""From the costs of every unit to the estimate of a step: what the plan prints and what the search minimizes.

Both use `pipeline_seconds`, so the objective optimized is the objective reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import ceil

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.memory_timeline import MemoryPoint, memory_peak, summed_peak
from galv.cost_models.pipeline import num_in_flight, simulate
from galv.cost_models.schedules import interleaved_in_flight, interleaved_seconds
from galv.cost_models.unit import Outer, UnitCost
from galv.cost_models.work import Setting
from galv.planner.plan import Estimate, MemoryBreakdown, ScheduleName, StageEstimate, TimeBreakdown, UnitEstimate
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One stage's busy time: per microbatch forward and backward, and once a step."""

    forward_seconds: float
    backward_seconds: float
    step_seconds: float

    def weighted(self, weights: tuple[float, float, float]) -> float:
        """The sum of the three with these weights; (m, m, 1) gives the busy seconds of a step of m microbatches."""
        forward, backward, step = weights
        return forward * self.forward_seconds + backward * self.backward_seconds + step * self.step_seconds


def pipeline_seconds(
    schedule: ScheduleName, stages: Sequence[StageSeconds], num_microbatches: int, transfer_seconds: float
) -> float:
    """Seconds of a step: the simulated schedule, then the longest once-a-step work of any stage."""
    timeline = simulate(
        schedule,
        [stage.forward_seconds for stage in stages],
        [stage.backward_seconds for stage in stages],
        num_microbatches,
        [transfer_seconds] * (len(stages) - 1),
    )
    return timeline.makespan_seconds + max(stage.step_seconds for stage in stages)


def _interleaved(stages: Sequence[StageSeconds], rounds: int, virtual_stages: int, transfer: float) -> float:
    forward, backward = [s.forward_seconds for s in stages], [s.backward_seconds for s in stages]
    makespan = interleaved_seconds(forward, backward, rounds, virtual_stages, transfer)
    return makespan + max(stage.step_seconds for stage in stages)


def _in_flight(schedule: ScheduleName, num_stages: int, rounds: int, virtual_stages: int) -> list[float]:
    """Microbatches whose activations each stage holds at once."""
    if virtual_stages > 1:
        return [interleaved_in_flight(i, num_stages, rounds, virtual_stages) for i in range(num_stages)]
    return [float(num_in_flight(schedule, i, num_stages, rounds)) for i in range(num_stages)]


def stage_seconds(costs: Sequence[UnitCost]) -> StageSeconds:
    """The busy time of a stage whose units cost `costs`."""
    return StageSeconds(
        forward_seconds=sum(c.forward_compute_seconds + c.forward_exposed_seconds for c in costs),
        backward_seconds=sum(c.backward_compute_seconds + c.backward_exposed_seconds for c in costs),
        step_seconds=sum(c.step_exposed_seconds + c.optimizer_seconds for c in costs),
    )


def stages_step_seconds(
    stages: Sequence[Sequence[UnitCost]],
    *,
    setting: Setting | Outer,
    schedule: ScheduleName,
    transfer_seconds: float,
    virtual_stages: int = 1,
    microbatch_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> float:
    """Seconds of a step whose stages hold units of the given costs; arguments as for `estimate_plan`."""
    rounds = setting.num_microbatches
    busy = [stage_seconds(costs) for costs in stages]
    if microbatch_seconds:
        busy = [replace(stage, forward_seconds=stage.forward_seconds + microbatch_seconds) for stage in busy]
    if virtual_stages == 1:
        return pipeline_seconds(schedule, busy, rounds, transfer_seconds) + step_seconds
    return _interleaved(busy, rounds, virtual_stages, transfer_seconds) + step_seconds


def estimate_plan(
    stages: Sequence[Sequence[UnitCost]],
    *,
    setting: Setting | Outer,
    schedule: ScheduleName,
    transfer_seconds: float,
    cluster: ClusterProfile,
    budget_bytes: int,
    tokens_per_step: int,
    model_flops: float,
    virtual_stages: int = 1,
    microbatch_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> Estimate:
    """The estimate of a plan whose stages hold units of the given costs, in order.

    With `virtual_stages` each stage's units are that many chunks of an interleaved pipeline. `microbatch_seconds` and
    `step_seconds` are added to every stage's forward and to the step.
    """
    rounds = setting.num_microbatches
    step = stages_step_seconds(
        stages,
        setting=setting,
        schedule=schedule,
        transfer_seconds=transfer_seconds,
        virtual_stages=virtual_stages,
        microbatch_seconds=microbatch_seconds,
        step_seconds=step_seconds,
    )
    in_flight = _in_flight(schedule, len(stages), rounds, virtual_stages)
    memories = stage_memories(stages, schedule, rounds, in_flight, cluster)
    details = tuple(map(_stage_estimate, stages, repeat(rounds), in_flight, repeat(step), memories))
    peaks = tuple(stage.memory.total_bytes for stage in details)
    peak_flops = cluster.device.peak(setting.precision)
    return Estimate(
        step_seconds=step,
        tokens_per_second=tokens_per_step / step,
        mfu=model_flops / (step * cluster.num_devices * peak_flops),
        model_flops=model_flops,
        peak_bytes=peaks,
        fits=max(peaks) <= budget_bytes,
        breakdown=_mean([stage.time for stage in details]),
        stages=details,
        transfer_seconds=transfer_seconds,
    )


def _mean(times: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """The mean of every part; all stages have equally many devices."""
    parts = TimeBreakdown.model_fields
    return TimeBreakdown(**{part: sum(getattr(time, part) for time in times) / len(times) for part in parts})


def _stage_estimate(
    costs: Sequence[UnitCost], rounds: int, in_flight: float, step: float, memory: MemoryBreakdown
) -> StageEstimate:
    units = tuple(_unit_estimate(cost, rounds, in_flight) for cost in costs)
    compute = sum(unit.compute_seconds for unit in units)
    communication = sum(unit.communication_seconds for unit in units)
    optimizer = sum(cost.optimizer_seconds for cost in costs)
    busy = stage_seconds(costs)
    return StageEstimate(
        time=TimeBreakdown(
            compute_seconds=compute,
            communication_seconds=communication,
            bubble_seconds=max(step - compute - communication - optimizer, 0.0),
            optimizer_seconds=optimizer,
        ),
        memory=memory,
        units=units,
        num_in_flight=ceil(in_flight),
        forward_seconds=busy.forward_seconds,
        backward_seconds=busy.backward_seconds,
        step_seconds=busy.step_seconds,
    )


def _unit_estimate(cost: UnitCost, rounds: int, in_flight: float) -> UnitEstimate:
    return UnitEstimate(
        compute_seconds=rounds * cost.compute_seconds,
        communication_seconds=rounds * cost.exposed_seconds + cost.step_exposed_seconds,
        state_bytes=round(cost.states.total_bytes),
        activations_bytes=round(in_flight * cost.activation_bytes),
    )


# ----------------------------------------------------------------------------------------------- memory


def stage_memories(
    stages: Sequence[Sequence[UnitCost]],
    schedule: ScheduleName,
    num_microbatches: int,
    in_flight: Sequence[float],
    cluster: ClusterProfile,
) -> list[MemoryBreakdown]:
    """Where the bytes of each stage's fullest device go at the peak.

    Where the parts of the units' working bytes are known the peak is that of the memory timeline, else the sum that a
    search bounds it with.
    """
    found = []
    for stage, (costs, flying) in enumerate(zip(stages, in_flight, strict=True)):
        if all(cost.working is not None for cost in costs):
            peak = memory_peak(
                costs, schedule=schedule, stage=stage, num_stages=len(stages), num_microbatches=num_microbatches
            )
        else:
            peak = summed_peak(costs, flying)
        found.append(_breakdown(peak, cluster))
    return found


def _breakdown(peak: MemoryPoint, cluster: ClusterProfile) -> MemoryBreakdown:
    return MemoryBreakdown(
        parameters_bytes=round(peak.parameters_bytes),
        gradients_bytes=round(peak.gradients_bytes),
        optimizer_bytes=round(peak.optimizer_bytes),
        activations_bytes=round(peak.activations_bytes),
        working_bytes=round(peak.working_bytes),
        reserved_bytes=round(reserved_bytes(peak.total_bytes, cluster.device)),
        context_bytes=cluster.device.context_bytes,
    )
