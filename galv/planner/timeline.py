"""The timeline of a plan's step, operation by operation: how long under which schedule, and where the bubble is."""

from __future__ import annotations

from typing import Literal, get_args

from galv.cost_models.schedules import (
    ChunkSeconds,
    Event,
    Orders,
    interleaved_orders,
    plain_orders,
    simulate_orders,
    zero_bubble_h1_orders,
    zero_bubble_v_orders,
)
from galv.errors import UnknownName
from galv.planner.plan import Plan

TimelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


def timeline(plan: Plan, schedule: TimelineSchedule | None = None) -> tuple[Event, ...]:
    """Every operation of a step of `plan` with its time; gradient reduction and the update come last.

    `schedule` asks what another one would do with the same stages; it need not be one that galv runs. Interleaved and
    V-shaped schedules take each stage's work in equal chunks. Draw it with `cost_models.schedules.chrome_trace`, sum
    its gaps with `bubble_seconds`. Raises UnknownName for a schedule that does not exist.
    """
    chosen = schedule or _own(plan)
    if chosen not in get_args(TimelineSchedule):
        raise UnknownName("schedule", chosen, get_args(TimelineSchedule))
    orders = _orders(chosen, plan)
    ends = [stage.step_seconds for stage in plan.estimate.stages]
    return simulate_orders(orders, _seconds(orders, plan), plan.estimate.transfer_seconds, ends)


def _own(plan: Plan) -> TimelineSchedule:
    if plan.pipeline.virtual_stages > 1:
        return "interleaved"
    return "gpipe" if plan.pipeline.schedule == "gpipe" else "1f1b"


def _orders(schedule: TimelineSchedule, plan: Plan) -> Orders:
    ranks, rounds = plan.pipeline.degree, plan.training.num_microbatches
    if schedule == "interleaved":
        return interleaved_orders(ranks, rounds, max(plan.pipeline.virtual_stages, 2))
    if schedule == "zb-h1":
        return zero_bubble_h1_orders(ranks, rounds)
    if schedule == "zbv":
        return zero_bubble_v_orders(ranks, rounds)
    return plain_orders(schedule, ranks, rounds)


def _seconds(orders: Orders, plan: Plan) -> ChunkSeconds:
    """Each rank's times, in equal parts over the chunks that it holds."""
    parts = orders.num_chunks // len(orders.ranks)
    stages = [plan.estimate.stages[orders.rank_of(chunk)] for chunk in range(orders.num_chunks)]
    return ChunkSeconds(
        tuple(stage.forward_seconds / parts for stage in stages),
        tuple(stage.backward_seconds / parts for stage in stages),
    )
