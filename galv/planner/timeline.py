"""The timeline of a plan's step, operation by operation: how long under which schedule, and where the bubble is."""

from __future__ import annotations

from galv.cost_models.schedules import ChunkSeconds, Event, simulate_orders
from galv.errors import UnknownName
from galv.planner.plan import Plan, ScheduleName
from galv.schedules import Orders, orders, orders_of

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def timeline(plan: Plan, schedule: str | None = None) -> tuple[Event, ...]:
    """Every operation of a step of `plan` with its time; gradient reduction and the update come last.

    `schedule` asks what another one would do with the same ranks, each of whose chunks takes an equal part of its
    rank's work, as they are taken to under the plan's own. Draw it with `cost_models.schedules.chrome_trace`, sum its
    gaps with `bubble_seconds`. Raises UnknownName for a schedule that does not exist.
    """
    if schedule is not None and schedule not in SCHEDULES:
        raise UnknownName("schedule", schedule, SCHEDULES)
    chosen = _orders(plan, schedule)
    ends = [stage.step_seconds for stage in plan.estimate.stages]
    return simulate_orders(chosen, _seconds(chosen, plan), plan.estimate.transfer_seconds, ends)


def _orders(plan: Plan, schedule: ScheduleName | None) -> Orders:
    ranks, rounds = plan.pipeline.degree, plan.training.num_microbatches
    if schedule is None or schedule == plan.pipeline.schedule:
        return orders_of(plan.pipeline, rounds)
    return orders(schedule, ranks, rounds, 2 if schedule in ("interleaved", "zbv") else 1)


def _seconds(chosen: Orders, plan: Plan) -> ChunkSeconds:
    """Each rank's times, in equal parts over the chunks that it holds."""
    parts = chosen.num_chunks // len(chosen.ranks)
    stages = [plan.estimate.stages[chosen.rank_of(chunk)] for chunk in range(chosen.num_chunks)]
    return ChunkSeconds(
        tuple(stage.forward_seconds / parts for stage in stages),
        tuple(stage.backward_seconds / parts for stage in stages),
        tuple(stage.weight_seconds / parts for stage in stages),
    )
