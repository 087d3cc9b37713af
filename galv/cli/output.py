"""How a plan is handed over: as a table or as JSON on standard output, and to a file when one is named."""

from __future__ import annotations

import sys
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
