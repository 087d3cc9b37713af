"""`galv show`: print a plan file, and draw the timeline of its step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galv.cli import options
from galv.cli.files import check_writable, read_plan, write_text
from galv.cli.output import deliver

if TYPE_CHECKING:
    from galv.planner.plan import Plan

Timeline = Annotated[
    Path | None,
    typer.Option(
        "--timeline",
        metavar="TRACE.JSON",
        help="Write what each pipeline rank does in a step as a Chrome trace, to be opened in ui.perfetto.dev.",
    ),
]
Explained = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="UNIT",
        help="Say why this unit has its strategy: what binds, and what switching would cost.",
    ),
]


def show(
    plan: options.PlanFile,
    as_json: options.AsJson = False,
    timeline: Timeline = None,
    explain: Explained = None,
) -> None:
    """Print a plan file, or say why it is as it is."""
    found = read_plan(plan)
    check_writable(timeline, "the timeline")
    if explain is None:
        deliver(found, output=None, as_json=as_json)
    else:
        _explain(found, explain, as_json=as_json)
    if timeline is not None:
        _draw(found, timeline)


def _explain(plan: Plan, unit: str, *, as_json: bool) -> None:
    from galv import api

    why = api.explain(plan, unit)
    sys.stdout.write(json.dumps(why.to_dict(), indent=1) + "\n" if as_json else f"{why}\n")


def _draw(plan: Plan, path: Path) -> None:
    from galv.cost_models.schedules import bubble_seconds, chrome_trace, makespan_seconds
    from galv.planner.timeline import timeline

    events = timeline(plan)
    write_text(chrome_trace(events), path, "the timeline")
    total = makespan_seconds(events)
    idle = [sum(parts) / total for parts in bubble_seconds(events, plan.pipeline.degree)]
    shares = ", ".join(f"{100 * share:.1f} %" for share in idle)
    print(f"Timeline written to {path}; bubble of each pipeline rank: {shares}", file=sys.stderr)
