"""What a dry run found beside what the plan was estimated to need, term by term: as values, as JSON and as a table."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from galv.cost_models.collectives import Collective as Predicted
from galv.planner.plan import MemoryBreakdown, Plan
from galv.runtime.dry_run import DryRun, PhaseMemory

GIB = 2**30


@dataclass(frozen=True)
class MemoryTerm:
    """A term of the estimate at the peak, and what the dry run held of it then."""

    name: str
    estimated_bytes: int
    checked_bytes: int


@dataclass(frozen=True)
class CollectiveTerm:
    """Calls of one kind, axis and size a step, as estimated and as made."""

    kind: str
    axis: str
    num_bytes: int
    estimated_count: int
    checked_count: int
    units: tuple[str, ...]
    """The classes of units that they are for; none for those of the step as a whole: counts, norms, the loss."""


@dataclass(frozen=True)
class RankCheck:
    """One rank's step. Peaks are of what is allocated: what the device itself takes is in neither."""

    rank: int
    stage: int
    estimated_peak_bytes: int
    checked_peak_bytes: int
    peak_phase: str
    memory: tuple[MemoryTerm, ...]
    """At the peak; they sum to it."""
    collectives: tuple[CollectiveTerm, ...]
    phases: tuple[PhaseMemory, ...]
    """The fullest moment of every phase of the step, in order."""

    @property
    def peak_error(self) -> float:
        """By which share the estimate is above the checked peak."""
        return self.estimated_peak_bytes / self.checked_peak_bytes - 1

    @property
    def collectives_agree(self) -> bool:
        return all(term.estimated_count == term.checked_count for term in self.collectives)


@dataclass(frozen=True)
class Check:
    """A plan's estimate held against its dry runs."""

    model: str
    layout: str
    ranks: tuple[RankCheck, ...]

    def to_json(self) -> str:
        """One JSON object, with a line break at its end."""
        derived = [
            {**asdict(rank), "peak_error": rank.peak_error, "collectives_agree": rank.collectives_agree}
            for rank in self.ranks
        ]
        return json.dumps({"model": self.model, "layout": self.layout, "ranks": derived}, indent=1) + "\n"

    def __str__(self) -> str:
        return "\n\n".join([f"{self.model}, {self.layout}", *(_rendered(rank) for rank in self.ranks)])


def compared(plan: Plan, runs: Iterable[DryRun], predicted: dict[int, tuple[Predicted, ...]]) -> Check:
    """`runs` beside the estimate in `plan`; `predicted` are the collectives of each stage that was run."""
    ranks = tuple(_compared(run, plan, predicted[run.stage]) for run in runs)
    return Check(plan.model.name, f"{plan.num_devices} x {plan.cluster.device}, {plan.training.precision}", ranks)


def _compared(run: DryRun, plan: Plan, predicted: tuple[Predicted, ...]) -> RankCheck:
    memory = plan.estimate.stages[run.stage].memory
    classes = {unit.name: unit.unit_class for unit in plan.stages[run.stage].units}
    return RankCheck(
        rank=run.rank,
        stage=run.stage,
        estimated_peak_bytes=memory.total_bytes - memory.reserved_bytes,
        checked_peak_bytes=run.peak.total_bytes,
        peak_phase=run.peak.phase,
        memory=_memory_terms(memory, run.peak),
        collectives=tuple(_collective_terms(run, predicted, classes)),
        phases=run.phases,
    )


def _memory_terms(estimate: MemoryBreakdown, peak: PhaseMemory) -> tuple[MemoryTerm, ...]:
    held = peak.num_bytes
    return (
        MemoryTerm("parameters", estimate.parameters_bytes, held["parameters"] + held["copies"]),
        MemoryTerm("gradients", estimate.gradients_bytes, held["gradients"]),
        MemoryTerm("optimizer", estimate.optimizer_bytes, held["optimizer"]),
        MemoryTerm("activations", estimate.activations_bytes, held["activations"]),
        MemoryTerm("working", estimate.working_bytes, held["gathered"] + held["reductions"] + held["temporaries"]),
    )


def _collective_terms(
    run: DryRun, predicted: tuple[Predicted, ...], classes: dict[str, str]
) -> Iterable[CollectiveTerm]:
    estimated: Counter[tuple[str, str, int]] = Counter()
    units: dict[tuple[str, str, int], set[str]] = {}
    for call in predicted:
        key: tuple[str, str, int] = (call.kind, call.axis, call.num_bytes)
        estimated[key] += call.count
        units.setdefault(key, set()).update({classes[call.unit]} if call.unit else ())
    checked = {(call.kind, call.axis, call.num_bytes): call.count for call in run.collectives}
    for key in sorted(estimated.keys() | checked.keys(), key=lambda k: (k[1], k[0], -k[2])):
        owners = tuple(sorted(units.get(key, ())))
        yield CollectiveTerm(*key, estimated[key], checked.get(key, 0), owners)


# ----------------------------------------------------------------------------------------------- as a table


def _rendered(rank: RankCheck) -> str:
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=110, color_system=None)
    memory = Table("memory, GiB", "estimate", "check", "difference", box=None, pad_edge=False)
    collectives = Table("collective", "axis", "bytes", "estimate", "check", "for", box=None, pad_edge=False)
    for table in (memory, collectives):
        for column in table.columns[1 + (table is collectives) :]:
            column.justify = "right" if column.header != "for" else "left"
    for term in rank.memory:
        memory.add_row(term.name, *_row(term.estimated_bytes, term.checked_bytes))
    memory.add_row("peak", *_row(rank.estimated_peak_bytes, rank.checked_peak_bytes))
    for call in rank.collectives:
        owners = ", ".join(call.units) or "the step"
        mark = "" if call.estimated_count == call.checked_count else "  differs"
        counts = (f"{call.num_bytes:,}", f"{call.estimated_count:,}", f"{call.checked_count:,}")
        collectives.add_row(call.kind, call.axis, *counts, owners + mark)
    console.print(f"rank {rank.rank}, stage {rank.stage}: peak in {rank.peak_phase}\n")
    console.print(memory)
    console.print()
    console.print(collectives)
    console.print(f"\ncollectives {'agree' if rank.collectives_agree else 'DIFFER'}, peak {rank.peak_error:+.1%}")
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _row(estimated: int, checked: int) -> tuple[str, str, str]:
    difference = f"{estimated / checked - 1:+.1%}" if checked else ("" if not estimated else "-")
    return f"{estimated / GIB:.3f}", f"{checked / GIB:.3f}", difference
