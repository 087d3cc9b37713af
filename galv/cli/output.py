"""How a plan is handed over: as a table or as JSON on standard output, and to a file when one is named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from galv.cli.files import write_plan

if TYPE_CHECKING:
    from galv.planner.plan import Plan


def deliver(plan: Plan, *, output: Path | None, as_json: bool) -> None:
    """Writes `plan` to `output` when given, and prints it."""
    if output is not None:
        write_plan(plan, output)
    sys.stdout.write(plan.to_json() if as_json else f"{plan}\n")
    if output is not None:
        print(f"Plan written to {output}", file=sys.stderr)


def deliver_ranked(plans: Sequence[Plan], *, output: Path | None, as_json: bool) -> None:
    """Prints `plans` side by side, or as one JSON list; with `output` each goes to a file of its own."""
    from galv.planner.front import ranking

    for number, plan in enumerate(plans, start=1):
        path = numbered(output, number)
        if path is not None:
            write_plan(plan, path)
    texts = ",\n".join(plan.to_json().rstrip() for plan in plans)
    sys.stdout.write(f"[{texts}]\n" if as_json else f"{ranking(plans)}\n")
    if output is not None:
        print(f"Plans written to {output} and so on", file=sys.stderr)


def numbered(path: Path | None, number: int) -> Path | None:
    """The file of the plan of that rank: PLAN.json, PLAN-2.json, PLAN-3.json."""
    return path if path is None or number == 1 else path.with_stem(f"{path.stem}-{number}")
