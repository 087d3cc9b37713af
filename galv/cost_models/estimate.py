"""From the costs of every unit to the estimate of a step: what the plan prints and what the search minimizes.

Both use `pipeline_seconds`, so the objective optimized is the objective reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import ceil

from galv.cost_models.in_flight import activations_in_flight
from galv.cost_models.makespan import makespan_seconds
from galv.cost_models.memory import reserved_bytes
from galv.cost_models.pipeline import num_in_flight, simulate
from galv.cost_models.unit import Setting, UnitCost
from galv.planner.plan import Estimate, MemoryBreakdown, ScheduleName, StageEstimate, TimeBreakdown, UnitEstimate
from galv.profiles.cluster import ClusterProfile
from galv.schedules import rank_of_chunk


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One stage's busy time: per microbatch forward and backward, and once a step."""

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    weight_seconds: float = 0.0
    """The part of `backward_seconds` that schedules with a split backward run later."""

    def weighted(self, weights: tuple[float, float, float]) -> float:
        """The sum of the three with these weights; (m, m, 1) gives the busy seconds of a step of m microbatches."""
        forward, backward, step = weights
        return forward * self.forward_seconds + backward * self.backward_seconds + step * self.step_seconds


def pipeline_seconds(
    schedule: ScheduleName,
    stages: Sequence[StageSeconds],
    num_microbatches: int,
    transfer_seconds: float,
    virtual_stages: int = 1,
) -> float:
    """Seconds of a step: the simulated schedule, then the longest once-a-step work of any pipeline rank.

    `stages` are the plan's stages: all chunks in the order of the model, `virtual_stages` of them on each rank.
    """
    forward = tuple(stage.forward_seconds for stage in stages)
    backward = tuple(stage.backward_seconds for stage in stages)
    transfers = (transfer_seconds,) * (len(stages) - 1)
    if schedule in ("none", "gpipe", "1f1b"):
        makespan = simulate(schedule, forward, backward, num_microbatches, transfers).makespan_seconds
    else:
        weight = tuple(stage.weight_seconds for stage in stages)
        makespan = makespan_seconds(schedule, forward, backward, weight, num_microbatches, transfers, virtual_stages)
    num_ranks = len(stages) // virtual_stages
    ends = [0.0] * num_ranks
    for chunk, stage in enumerate(stages):
        ends[rank_of_chunk(schedule, num_ranks, chunk)] += stage.step_seconds
    return makespan + max(ends)


def _evenly(stages: Sequence[StageSeconds], schedule: ScheduleName, virtual_stages: int) -> list[StageSeconds]:
    """The chunks of ranks whose busy times are `stages`, each an equal part of its rank."""
    ranks = [rank_of_chunk(schedule, len(stages), chunk) for chunk in range(len(stages) * virtual_stages)]
    return [StageSeconds(*(x / virtual_stages for x in astuple(stages[rank]))) for rank in ranks]


def _in_flight(schedule: ScheduleName, num_stages: int, rounds: int, virtual_stages: int) -> list[float]:
    """Microbatches whose activations each stage holds at once."""
    if schedule in ("none", "gpipe", "1f1b"):
        return [float(num_in_flight(schedule, i, num_stages, rounds)) for i in range(num_stages)]
    return [activations_in_flight(schedule, i, num_stages, rounds, virtual_stages) for i in range(num_stages)]


def stage_seconds(costs: Sequence[UnitCost]) -> StageSeconds:
    """The busy time of a stage whose units cost `costs`."""
    return StageSeconds(
        forward_seconds=sum(c.forward_compute_seconds + c.forward_exposed_seconds for c in costs),
        backward_seconds=sum(c.backward_compute_seconds + c.backward_exposed_seconds for c in costs),
        step_seconds=sum(c.step_exposed_seconds + c.optimizer_seconds for c in costs),
        weight_seconds=sum(c.weight_seconds for c in costs),
    )


def stages_step_seconds(
    stages: Sequence[Sequence[UnitCost]],
    *,
    setting: Setting,
    schedule: ScheduleName,
    transfer_seconds: float,
    virtual_stages: int = 1,
    microbatch_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> float:
    """Seconds of a step whose stages hold units of the given costs; arguments as for `estimate_plan`."""
    busy = [stage_seconds(costs) for costs in stages]
    if microbatch_seconds:
        busy = [replace(stage, forward_seconds=stage.forward_seconds + microbatch_seconds) for stage in busy]
    chunks = _evenly(busy, schedule, virtual_stages)
    rounds = setting.num_microbatches
    return pipeline_seconds(schedule, chunks, rounds, transfer_seconds, virtual_stages) + step_seconds


def estimate_plan(
    stages: Sequence[Sequence[UnitCost]],
    *,
    setting: Setting,
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
    details = tuple(
        _stage_estimate(costs, rounds, flying, step, cluster) for costs, flying in zip(stages, in_flight, strict=True)
    )
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
    costs: Sequence[UnitCost], rounds: int, in_flight: float, step: float, cluster: ClusterProfile
) -> StageEstimate:
    units = tuple(_unit_estimate(cost, rounds, in_flight) for cost in costs)
    compute = sum(unit.compute_seconds for unit in units)
    communication = sum(unit.communication_seconds for unit in units)
    optimizer = sum(cost.optimizer_seconds for cost in costs)
    return StageEstimate(
        time=TimeBreakdown(
            compute_seconds=compute,
            communication_seconds=communication,
            bubble_seconds=max(step - compute - communication - optimizer, 0.0),
            optimizer_seconds=optimizer,
        ),
        memory=stage_memory(costs, in_flight, cluster),
        units=units,
        num_in_flight=ceil(in_flight),
        **asdict(stage_seconds(costs)),
    )


def _unit_estimate(cost: UnitCost, rounds: int, in_flight: float) -> UnitEstimate:
    return UnitEstimate(
        compute_seconds=rounds * cost.compute_seconds,
        communication_seconds=rounds * cost.exposed_seconds + cost.step_exposed_seconds,
        state_bytes=round(cost.states.total_bytes),
        activations_bytes=round(in_flight * cost.activation_bytes),
    )


def stage_memory(costs: Sequence[UnitCost], in_flight: float, cluster: ClusterProfile) -> MemoryBreakdown:
    """Where the bytes of a stage's fullest device go, with `in_flight` microbatches alive."""
    parameters = sum(cost.states.parameters_bytes for cost in costs)
    gradients = sum(cost.states.gradients_bytes for cost in costs)
    optimizer = sum(cost.states.optimizer_bytes for cost in costs)
    activations = in_flight * sum(cost.activation_bytes for cost in costs)
    working = max(cost.working_bytes for cost in costs)
    return MemoryBreakdown(
        parameters_bytes=round(parameters),
        gradients_bytes=round(gradients),
        optimizer_bytes=round(optimizer),
        activations_bytes=round(activations),
        working_bytes=round(working),
        reserved_bytes=round(
            reserved_bytes(parameters + gradients + optimizer + activations + working, cluster.device)
        ),
    )
