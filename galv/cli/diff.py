"""`galv diff`: what differs between two plan files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from galv.cli import options
from galv.cli.files import read_plan

First = Annotated[Path, typer.Argument(metavar="A.JSON", help="A plan file.", show_default=False)]
Second = Annotated[Path, typer.Argument(metavar="B.JSON", help="Another.", show_default=False)]


def diff(a: First, b: Second, as_json: options.AsJson = False) -> None:
    """Say what differs between two plans: set-up, strategies, seconds and bytes."""
    one, other = read_plan(a), read_plan(b)
    from galv.planner.plan_diff import differences

    found = differences(one, other)
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n" if as_json else f"{found}\n")
