"""From the costs of every unit to the estimate of a step: what the plan prints and what the search minimizes.

Both use `pipeline_seconds`, so the objective optimized is the objective reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from math import ceil

from galv.cost_models.in_flight import activations_in_flight
from galv.cost_models.makespan import makespan_seconds
from galv.cost_models.memory import reserved_bytes
from galv.cost_models.memory_timeline import MemoryPoint, memory_peak, summed_peak
from galv.cost_models.pipeline import num_in_flight, simulate
from galv.cost_models.unit import Outer, UnitCost
from galv.cost_models.work import Setting
from galv.planner.plan import (
    Estimate,
    MemoryBreakdown,
    Pipeline,
    ScheduleName,
    StageEstimate,
    TimeBreakdown,
    UnitEstimate,
)
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
    """The stages with each rank's busy time shared out evenly among its own."""
    num_ranks = len(stages) // virtual_stages
    ranks = [rank_of_chunk(schedule, num_ranks, chunk) for chunk in range(len(stages))]
    totals = [[0.0] * 4 for _ in range(num_ranks)]
    for rank, stage in zip(ranks, stages, strict=True):
        totals[rank] = [x + y for x, y in zip(totals[rank], astuple(stage), strict=True)]
    return [StageSeconds(*(x / virtual_stages for x in totals[rank])) for rank in ranks]


def _in_flight(schedule: ScheduleName, num_stages: int, rounds: int, virtual_stages: int) -> list[float]:
    """Microbatches whose activations each pipeline rank holds at once."""
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
    setting: Setting | Outer,
    schedule: ScheduleName,
    transfer_seconds: float,
    virtual_stages: int = 1,
    even: bool = False,
    microbatch_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> float:
    """Seconds of a step whose stages hold units of the given costs; arguments as for `estimate_plan`."""
    busy = [stage_seconds(costs) for costs in stages]
    if even:
        busy = _evenly(busy, schedule, virtual_stages)
    if microbatch_seconds:
        more = microbatch_seconds / virtual_stages
        busy = [replace(stage, forward_seconds=stage.forward_seconds + more) for stage in busy]
    rounds = setting.num_microbatches
    return pipeline_seconds(schedule, busy, rounds, transfer_seconds, virtual_stages) + step_seconds


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
    even: bool = False,
    microbatch_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> Estimate:
    """The estimate of a plan whose stages, all chunks in the order of the model, hold units of the given costs.

    `virtual_stages` of them lie on each pipeline rank; `even` takes these to be equal parts of what the rank does.
    `microbatch_seconds` and `step_seconds` are added to every rank's forward and to the step.
    """
    rounds = setting.num_microbatches
    step = stages_step_seconds(
        stages,
        setting=setting,
        schedule=schedule,
        transfer_seconds=transfer_seconds,
        virtual_stages=virtual_stages,
        even=even,
        microbatch_seconds=microbatch_seconds,
        step_seconds=step_seconds,
    )
    pipeline = Pipeline(degree=len(stages) // virtual_stages, schedule=schedule, virtual_stages=virtual_stages)
    ranks = [[stages[i] for i in pipeline.stages_of_rank(rank)] for rank in range(pipeline.degree)]
    in_flight = _in_flight(schedule, pipeline.degree, rounds, virtual_stages)
    memories = rank_memories(ranks, pipeline, rounds, cluster)
    whole = [[cost for stage in rank for cost in stage] for rank in ranks]
    details = tuple(map(_stage_estimate, whole, repeat(rounds), in_flight, repeat(step), memories))
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
        uncertainty=_uncertainty(_mean([stage.time for stage in details]), cluster),
    )


def _uncertainty(time: TimeBreakdown, cluster: ClusterProfile) -> float:
    """The spread of the readings behind each part of a step, taken to vary together, as a share of the step.

    A bubble is other stages' work, and varies as work does.
    """
    device = 0.0 if cluster.device.measured is None else cluster.device.measured.spread
    links = [link.measured.spread for link in (cluster.intra_node, cluster.inter_node) if link.measured is not None]
    sent = time.communication_seconds
    return (device * (time.total_seconds - sent) + max(links, default=0.0) * sent) / time.total_seconds


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
        weight_seconds=busy.weight_seconds,
    )


def _unit_estimate(cost: UnitCost, rounds: int, in_flight: float) -> UnitEstimate:
    return UnitEstimate(
        compute_seconds=rounds * cost.compute_seconds,
        communication_seconds=rounds * cost.exposed_seconds + cost.step_exposed_seconds,
        state_bytes=round(cost.states.total_bytes),
        activations_bytes=round(in_flight * cost.activation_bytes),
    )


# ----------------------------------------------------------------------------------------------- memory


def rank_memories(
    ranks: Sequence[Sequence[Sequence[UnitCost]]], pipeline: Pipeline, num_microbatches: int, cluster: ClusterProfile
) -> list[MemoryBreakdown]:
    """Where the bytes of each pipeline rank's fullest device go at the peak; `ranks` hold the units of their stages.

    Where the parts of the units' working bytes are known the peak is that of the memory timeline, else the sum that a
    search bounds it with.
    """
    in_flight = _in_flight(pipeline.schedule, pipeline.degree, num_microbatches, pipeline.virtual_stages)
    found = []
    for rank, stages in enumerate(ranks):
        if all(cost.working is not None for stage in stages for cost in stage):
            peak = memory_peak(stages, pipeline, rank, num_microbatches)
        else:
            peak = summed_peak([cost for stage in stages for cost in stage], in_flight[rank])
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
