"""The face of a plan: the plain-text table that `print(plan)` shows. Formats, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from galv.planner.plan import Alternative, Plan, StageEstimate, Unit

GIB = 2**30
_HEADINGS = ("stage", "units", "strategy", "compute", "exposed", "bubble", "peak GiB")
_LEGEND = "seconds of one step, all microbatches; exposed: communication that no computation hides"


def render(plan: Plan) -> str:
    """The plan as a table for people: set-up, stages, totals, habitual alternatives, what the search did."""
    parts = [_setup(plan), _stages(plan), _totals(plan), _alternatives(plan), _search(plan), _notes(plan)]
    return "\n\n".join(part for part in parts if part)


def seconds(value: float) -> str:
    """`value` seconds with three significant digits and a unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.{_decimals(value / scale)}f} {unit}"
    return f"{value / 1e-6:.0f} us" if value >= 0.5e-6 else "0"


def gib(num_bytes: float) -> str:
    """`num_bytes` in GiB, with the digits that matter."""
    value = num_bytes / GIB
    return f"{value:.{_gib_digits(value)}f}"


def size(num_bytes: float) -> str:
    """`num_bytes` with three significant digits and a unit that suits: 74.6 GiB, 31.0 MiB, 512 KiB."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{_decimals(num_bytes / scale)}f} {unit}"
    return f"{num_bytes:.0f}"


def gib_enough(num_bytes: float) -> str:
    """`num_bytes` in GiB as `gib` writes it, but rounded up: a budget that someone may type again."""
    value = num_bytes / GIB
    digits = _gib_digits(value)
    return f"{ceil(value * 10**digits) / 10**digits:.{digits}f}"


def _gib_digits(value: float) -> int:
    return 1 if value >= 10 else 2 if value >= 0.1 else 4


def count(value: float) -> str:
    """`value` in words of thousands: 8.03 billion."""
    for unit, scale in ((" trillion", 1e12), (" billion", 1e9), (" million", 1e6)):
        if value >= scale:
            return f"{value / scale:.{_decimals(value / scale)}f}{unit}"
    return f"{value:,.0f}"


def _decimals(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0


# ----------------------------------------------------------------------------------------------- the parts


def _setup(plan: Plan) -> str:
    training, cluster = plan.training, plan.cluster
    sample = f"sequence {training.seq_len:,}, " if training.seq_len else ""
    nodes = f" on {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    batch = (
        f"global batch {training.global_batch:,} = {plan.data_parallel_degree} data-parallel x "
        f"{training.num_microbatches} microbatches x {plan.micro_batch}"
    )
    pipeline = plan.pipeline
    stages = f", pipeline of {pipeline.degree} ({pipeline.schedule})" if pipeline.degree > 1 else ""
    return (
        f"{plan.model.name}, {count(plan.model.num_parameters)} parameters, "
        f"on {cluster.num_devices} x {cluster.device}{nodes}\n"
        f"{sample}{batch}{stages}, {training.precision}, {training.optimizer}"
    )


def _stages(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for index, estimate in enumerate(plan.estimate.stages):
        rows += _stage_rows(index, plan.units_of_rank(index), estimate, plan.cluster.memory_budget_bytes)
    return f"{table(rows, right=(3, 4, 5, 6))}\n({_LEGEND})"


def _stage_rows(
    index: int, units: Sequence[Unit], estimate: StageEstimate, budget_bytes: int
) -> Iterator[tuple[str, ...]]:
    pairs = zip(units, estimate.units, strict=True)
    for position, (_, run) in enumerate(groupby(pairs, key=lambda pair: (pair[0].unit_class, pair[0].strategy))):
        members = list(run)
        first = position == 0
        yield (
            str(index) if first else "",
            unit_names([unit.name for unit, _ in members]),
            str(members[0][0].strategy),
            seconds(sum(cost.compute_seconds for _, cost in members)),
            seconds(sum(cost.communication_seconds for _, cost in members)),
            seconds(estimate.time.bubble_seconds) if first else "",
            f"{gib(estimate.memory.total_bytes)} of {gib(budget_bytes)}" if first else "",
        )


def unit_names(names: Sequence[str]) -> str:
    """One name for a run of units: `model.layers.0-31` for consecutive blocks of one list."""
    if len(names) == 1:
        return names[0]
    stem, _, first = names[0].rpartition(".")
    last_stem, _, last = names[-1].rpartition(".")
    if stem == last_stem and first.isdigit() and last.isdigit() and int(last) - int(first) + 1 == len(names):
        return f"{stem}.{first}-{last}"
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _totals(plan: Plan) -> str:
    estimate = plan.estimate
    what = "tokens/s" if plan.training.seq_len else "samples/s"
    time = estimate.breakdown
    shares = (
        ("compute", time.compute_seconds),
        ("exposed communication", time.communication_seconds),
        ("bubble", time.bubble_seconds),
        ("optimizer", time.optimizer_seconds),
    )
    mean = " (mean of the stages)" if len(plan.stages) > 1 else ""
    busiest = max(estimate.stages, key=lambda stage: stage.memory.total_bytes)
    rate = f"{estimate.tokens_per_second:,.0f} {what}   MFU {100 * estimate.mfu:.1f} %"
    lines = [
        f"step {seconds(estimate.step_seconds)}{_give_or_take(estimate.uncertainty)}   {rate}",
        "time   " + ", ".join(f"{name} {100 * value / estimate.step_seconds:.1f} %" for name, value in shares) + mean,
        f"memory {_memory(busiest)}" + (" (at the peak of the fullest stage)" if len(plan.stages) > 1 else ""),
    ]
    if not estimate.fits:
        worst = max(estimate.peak_bytes)
        lines.append(f"DOES NOT FIT: {gib(worst)} GiB of {gib(plan.cluster.memory_budget_bytes)} GiB")
    return "\n".join(lines)


def _give_or_take(uncertainty: float) -> str:
    return f" +-{100 * uncertainty:.0f} %" if uncertainty >= 0.005 else ""


def _memory(stage: StageEstimate) -> str:
    memory = stage.memory
    parts = (
        ("parameters", memory.parameters_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("working", memory.working_bytes),
        ("reserved", memory.reserved_bytes),
    )
    return ", ".join(f"{name} {size(value)}" for name, value in parts)


def _alternatives(plan: Plan) -> str:
    if not plan.alternatives:
        return ""
    rows: list[tuple[str, ...]] = [("by habit", "layout", "step", "against the plan")]
    rows += [_alternative_row(item, plan.estimate.step_seconds) for item in plan.alternatives]
    return table(rows, right=(2,))


def _alternative_row(item: Alternative, best_seconds: float) -> tuple[str, ...]:
    if item.step_seconds is None:
        return (item.name, item.layout or "-", "-", item.reason)
    return (item.name, item.layout, seconds(item.step_seconds), _against(item.step_seconds / best_seconds))


def _against(ratio: float) -> str:
    if ratio >= 2:
        return f"{ratio:.1f} times as long"
    return "equal" if abs(ratio - 1) < 0.0005 else f"{100 * (ratio - 1):+.1f} %"


_AIMS = {"throughput": "", "memory": " for the least memory", "cost": " for the fewest device-hours"}


def _search(plan: Plan) -> str:
    if plan.search is None:
        return ""
    report = plan.search
    proof = "proven optimal" if report.proven_optimal else f"at most {100 * report.gap:.2g} % from optimal"
    under = f" under {', '.join(report.demands)}" if report.demands else ""
    found = f"searched {report.candidates:,} layouts in {report.seconds:.1f} s{_AIMS[report.objective]}: {proof}"
    lines = [f"{found} in the searched space{under}"]
    lines += [f"{number:>{len(f'{report.candidates:,}') + 9},}: {reason}" for reason, number in report.pruned]
    return "\n".join(lines)


def _notes(plan: Plan) -> str:
    return "\n".join(f"note: {note}" for note in plan.notes)


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """`rows` as aligned text, the first being the headings; columns `right` are flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = set(right)
    lines = []
    for row in rows:
        cells = [text.rjust(width) if i in aligned else text.ljust(width) for i, (text, width) in _columns(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _columns(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))
