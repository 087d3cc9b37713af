"""Plans of one model on one cluster, side by side: what differs between them, and step time against memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from galv.planner.plan import Plan
from galv.planner.plan_table import gib, gib_enough, seconds, table
from galv.planner.sweep import in_words


@dataclass(frozen=True)
class FrontPoint:
    """One plan of a front."""

    budget_bytes: int
    """The memory of a device under which the plan is the fastest."""
    peak_bytes: int
    step_seconds: float
    tokens_per_second: float
    """Samples per second where a sample has no tokens."""
    mfu: float
    layout: str

    @classmethod
    def of(cls, plan: Plan) -> FrontPoint:
        """The point that `plan` makes."""
        estimate = plan.estimate
        return cls(
            budget_bytes=plan.cluster.memory_budget_bytes,
            peak_bytes=max(estimate.peak_bytes),
            step_seconds=estimate.step_seconds,
            tokens_per_second=estimate.tokens_per_second,
            mfu=estimate.mfu,
            layout=in_words(plan),
        )


@dataclass(frozen=True)
class Front:
    """Plans that are each the fastest under their memory budget, the smallest budget first; `str` is a table."""

    plans: tuple[Plan, ...]

    @property
    def points(self) -> tuple[FrontPoint, ...]:
        """The figures of each plan."""
        return tuple(map(FrontPoint.of, self.plans))

    def to_csv(self) -> str:
        """A header and a line for each plan."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(FrontPoint)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in self.points)
        return text.getvalue()

    def __str__(self) -> str:
        first = self.plans[0]
        what = "tokens" if first.training.seq_len else "samples"
        rows = [("memory GiB", "peak GiB", "step", f"{what}/s", "MFU", "layout")]
        rows += [
            (
                gib_enough(point.budget_bytes),
                gib(point.peak_bytes),
                seconds(point.step_seconds),
                f"{point.tokens_per_second:,.0f}",
                f"{100 * point.mfu:.1f}",
                point.layout,
            )
            for point in self.points
        ]
        where = f"{first.model.name} on {first.num_devices} x {first.cluster.device}"
        return f"{where}: the fastest plan within so much memory per device\n{table(rows, right=range(5))}"


def ranking(plans: Sequence[Plan]) -> str:
    """Plans of one request as a table, best first, each with what it lacks against the first in what was asked for."""
    first = plans[0]
    rows = [("plan", "devices", "step", "peak GiB", "against the first", "pipeline", "microbatches", "strategies")]
    for number, plan in enumerate(plans, start=1):
        pipeline = plan.pipeline
        chunks = f" x{pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else ""
        rows.append(
            (
                str(number),
                str(plan.num_devices),
                seconds(plan.estimate.step_seconds),
                gib(max(plan.estimate.peak_bytes)),
                "" if plan is first else f"{100 * (_value(plan) / _value(first) - 1):+.2f} %",
                "none" if pipeline.degree == 1 else f"{pipeline.degree} {pipeline.schedule}{chunks}",
                f"{plan.training.num_microbatches} x {plan.micro_batch}",
                _strategies(plan),
            )
        )
    aim = first.search.objective if first.search else "throughput"
    where = f"{first.model.name} on {first.cluster.device}, global batch {first.training.global_batch:,}"
    return f"{where}: the {len(plans)} best plans of different layouts by {aim}\n{table(rows, right=range(5))}"


def _value(plan: Plan) -> float:
    """What the plan's search made small."""
    aim = plan.search.objective if plan.search else "throughput"
    if aim == "memory":
        return max(plan.estimate.peak_bytes)
    return plan.estimate.step_seconds * (plan.num_devices if aim == "cost" else 1)


def _strategies(plan: Plan) -> str:
    """The strategies of the plan's units, those of most units first."""
    found = [str(unit.strategy) for unit in plan.units()]
    counts = sorted(((found.count(one), one) for one in dict.fromkeys(found)), key=lambda pair: -pair[0])
    shown = [f"{number} {one}" for number, one in counts[:3]]
    rest = len(found) - sum(number for number, _ in counts[:3])
    return ", ".join([*shown, f"{rest} other"] if rest else shown)
