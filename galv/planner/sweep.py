"""Many plans of one model side by side: step time, throughput, memory and cost against the cluster and the sequence."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.planner.plan_table import gib, seconds, table

MAX_POINTS = 1000
_BRACES = re.compile(r"\{([^{}]*)\}")
_SPAN = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class SweepPoint:
    """The best plan for one cluster, sequence length and global batch; figures are None where there is none."""

    cluster: str
    num_devices: int
    seq_len: int | None
    global_batch: int
    layout: str
    """In a few words; why there is no plan, where there is none."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    """Samples per second where a sample has no tokens."""
    mfu: float | None = None
    peak_bytes: int | None = None
    device_hours_per_billion: float | None = None
    """Device-hours for a billion tokens (samples)."""
    cost_per_billion: float | None = None
    """The same in money, where a price is known."""

    @classmethod
    def of(cls, plan: Plan, price_per_device_hour: float | None) -> SweepPoint:
        """The point that `plan` makes."""
        estimate = plan.estimate
        hours = plan.num_devices * 1e9 / estimate.tokens_per_second / 3600
        return cls(
            cluster=plan.cluster.spec,
            num_devices=plan.num_devices,
            seq_len=plan.training.seq_len,
            global_batch=plan.training.global_batch,
            layout=in_words(plan),
            step_seconds=estimate.step_seconds,
            tokens_per_second=estimate.tokens_per_second,
            mfu=estimate.mfu,
            peak_bytes=max(estimate.peak_bytes),
            device_hours_per_billion=hours,
            cost_per_billion=None if price_per_device_hour is None else hours * price_per_device_hour,
        )


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep, in the order that they were asked for. `str` is a table, `to_csv` one for programs."""

    model: str
    points: tuple[SweepPoint, ...]

    def to_csv(self) -> str:
        """A header and a line for each point; empty fields where there is no plan."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(SweepPoint)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(point) for point in self.points)
        return text.getvalue()

    def __str__(self) -> str:
        tokens = any(point.seq_len for point in self.points)
        priced = any(point.cost_per_billion is not None for point in self.points)
        what = "tokens" if tokens else "samples"
        headings = ("cluster", "devices", "sequence", "batch", "step", f"{what}/s", "MFU", "peak GiB", "device-h")
        rows = [(*headings, *(["cost"] if priced else []), "layout")]
        rows += [_row(point, priced=priced) for point in self.points]
        right = range(1, 9 + priced)
        legend = f"(device-h{' and cost' if priced else ''}: for a billion {what})"
        return f"{self.model}\n{table(rows, right=right)}\n{legend}"


def in_words(plan: Plan) -> str:
    """What a plan does, in a line: pipeline, then the strategies that most units have."""
    pipeline = plan.pipeline
    chunks = f" x{pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else ""
    parts = [f"pp{pipeline.degree} {pipeline.schedule}{chunks}"] if pipeline.degree > 1 else []
    strategies = [str(unit.strategy) for unit in plan.units() if unit.is_block] or [
        str(unit.strategy) for unit in plan.units()
    ]
    common = max(dict.fromkeys(strategies), key=strategies.count)
    others = len(set(strategies)) - 1
    mixed = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return " ".join([*parts, f"{common}{mixed}, microbatch {plan.micro_batch}"])


def expanded(text: str) -> list[str]:
    """What braces in `text` stand for: `8x{1,2}` is `8x1` and `8x2`, `{1..3}` is 1, 2, 3. Several multiply.

    Raises UsageError for a brace that is not closed, an empty one, or more than MAX_POINTS texts.
    """
    found = list(_expanded(text))
    if any(brace in one for one in found for brace in "{}"):
        raise UsageError(f"{text!r}: a brace is open; write lists such as 8x{{1,2,4}} or 8x{{1..4}}")
    if len(found) > MAX_POINTS:
        raise UsageError(f"{text!r} stands for more than {MAX_POINTS} clusters")
    return found


def _expanded(text: str) -> Iterator[str]:
    brace = _BRACES.search(text)
    if brace is None:
        yield text
        return
    span = _SPAN.fullmatch(brace[1])
    if span is None:
        values = [value.strip() for value in brace[1].split(",")]
    else:
        first, last = int(span[1]), int(span[2])
        values = [str(number) for number in range(first, min(last, first + MAX_POINTS) + 1)]
    if not values or not all(values):
        raise UsageError(f"{text!r}: nothing stands in a brace; write lists such as 8x{{1,2,4}} or 8x{{1..4}}")
    for value in values:
        yield from _expanded(text[: brace.start()] + value + text[brace.end() :])


def _row(point: SweepPoint, *, priced: bool) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        point.cluster,
        str(point.num_devices),
        shown(point.seq_len, ","),
        f"{point.global_batch:,}",
        "-" if point.step_seconds is None else seconds(point.step_seconds),
        shown(point.tokens_per_second, ",.0f"),
        shown(None if point.mfu is None else 100 * point.mfu, ".1f"),
        "-" if point.peak_bytes is None else gib(point.peak_bytes),
        shown(point.device_hours_per_billion, ",.1f"),
        *([shown(point.cost_per_billion, ",.0f")] if priced else []),
        point.layout,
    )
