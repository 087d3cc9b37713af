"""Rows with their captured models: what the benchmark asks and the fit asks again and again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import galv
from accuracy import rows
from accuracy.rows import Case, Row
from galv.cost_models.stacked import WorkLibrary
from galv.planner.by_hand import Layout
from galv.planner.by_stack import StackExtras, StackLayout, library_of, priced_stages, stack_layout
from galv.planner.plan import Estimate
from galv.planner.space import Request
from galv.profiles.stack import load_stack


@dataclass(frozen=True)
class Question:
    """One usable row, its captured model, and the layout in the terms of the cost models."""

    case: Case
    library: WorkLibrary
    layout: StackLayout
    request: Request

    def peak_bytes(self, estimate: Estimate) -> float:
        """The predicted peak in the terms of the row: of the stage and of the kind that its source prints."""
        return peak_bytes(self.case, estimate)

    def device_bytes(self, estimate: Estimate) -> float:
        """What the fullest device is predicted to need."""
        return max(estimate.peak_bytes)


def peak_bytes(case: Case, estimate: Estimate) -> float:
    """The predicted peak of the stage and of the kind (allocated, reserved, device) that the row's source prints.

    Where the kind is not known, it is taken to be what the source's tools usually print, see `rows.MEMORY_KIND`.
    """
    stage = rows.MEMORY_STAGE.get(case.source)
    memories = [one.memory for one in estimate.stages]
    chosen = memories if stage is None else [memories[0 if stage == "first" else -1]]
    device = case.cluster.device
    allocated = max(memory.total_bytes - memory.reserved_bytes for memory in chosen)
    kind = case.row["memory_kind"]
    if kind not in ("allocated", "reserved", "device"):
        kind = rows.MEMORY_KIND.get(case.source, "allocated")
    if kind == "device":
        return max(memory.total_bytes for memory in chosen)
    return allocated * (1 + device.allocator_slack) if kind == "reserved" else allocated


def question(case: Case) -> Question:
    """The question that `case` asks. Raises galv.UsageError where galv has no such layout."""
    given = case.layout
    request = Request(given["global_batch"], case.seq_len, case.precision, "adamw", case.cluster.device.memory_bytes)  # type: ignore[arg-type]
    layout = Layout(
        tp=given["tp"],
        pp=given["pp"],
        zero=given["zero"],
        micro_batch=given["micro_batch"],
        sequence=given["sequence"],
        recompute=given["recompute"],
        schedule=None,
    )
    extras = StackExtras(given["virtual_stages"], given["cp"], given["attention"] == "fused")
    library = library_of(rows.graph(case.model_key, case.precision))
    return Question(case, library, stack_layout(case.cluster, layout, extras, request), request)


def collect(
    data: Path, *, only: str | None = None, left_out: Callable[[Row, str], None] | None = None
) -> list[Question]:
    """Every usable row of the folder, its model captured and priced once; `left_out` hears of the others."""
    note = left_out or (lambda _row, _reason: None)
    chosen = [row for row in rows.read_rows(data) if only in (None, row["source"])]
    found = sorted(rows.cases(chosen, note), key=lambda case: (case.model_key, case.precision))
    answered = []
    for i, case in enumerate(found):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{i + 1} of {len(found)} rows")
        try:
            asked = question(case)
            priced_stages(asked.library, case.cluster, load_stack(case.stack), asked.layout, asked.request)
        except galv.GalvError as error:
            note(case.row, str(error))
        else:
            answered.append(asked)
    return answered
