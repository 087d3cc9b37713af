"""A training run as `galv run --record` keeps it: what was measured on all ranks, beside the plan's estimate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from galv.planner.plan import Plan
from galv.profiles.measure.sampling import spread
from galv.profiles.run_record import RECORD_VERSION, CollectiveRecord, RunRecord, StagePrediction, StageRecord
from galv.runtime.step_profile import StepProfile
from galv.runtime.trainer import StepRecord


def recorded(plan: Plan, seen: Sequence[StepRecord], profile: StepProfile, device: torch.device) -> RunRecord | None:
    """The record on rank 0, None elsewhere. Collective. The first step warms up and the last one was profiled."""
    counted = seen[1:-1] or seen
    own = torch.zeros(dist.get_world_size(), 3, dtype=torch.float64, device=device)
    update = statistics.median(record.optimizer_seconds for record in counted)
    own[dist.get_rank()] = torch.tensor([profile.busy_seconds, update, seen[-1].peak_bytes])
    dist.all_reduce(own)
    if dist.get_rank() != 0:
        return None
    stages = [part.amax(0).tolist() for part in own.chunk(plan.pipeline.degree)]
    seconds, cluster, estimate = [record.seconds for record in counted], plan.cluster, plan.estimate
    return RunRecord(
        record_version=RECORD_VERSION,
        model=plan.model.name,
        cluster=cluster.spec,
        devices_per_node=cluster.devices_per_node,
        num_nodes=cluster.num_nodes,
        steps=len(seen),
        step_seconds=statistics.median(seconds),
        step_spread=spread(seconds),
        predicted_step_seconds=estimate.step_seconds,
        stages=tuple(
            StageRecord(busy_seconds=busy, optimizer_seconds=updated, peak_bytes=int(peak))
            for busy, updated, peak in stages
        ),
        predicted=tuple(
            StagePrediction(
                busy_seconds=stage.time.compute_seconds + stage.time.communication_seconds,
                optimizer_seconds=stage.time.optimizer_seconds,
                peak_bytes=peak,
                compute_seconds=stage.time.compute_seconds,
            )
            for stage, peak in zip(estimate.stages, estimate.peak_bytes, strict=True)
        ),
        collectives=tuple(
            CollectiveRecord(name=name, count=count, seconds=time)
            for name, (count, time) in profile.collectives.items()
        ),
    )
