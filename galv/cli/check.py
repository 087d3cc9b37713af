"""`galv check`: hold a plan's estimate against its real training step, run without devices."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from galv.cli import options
from galv.cli.files import read_plan

Rank = Annotated[
    int | None,
    typer.Option("--rank", min=0, metavar="R", help="The rank to run; by default the first of the fullest stage."),
]
AllStages = Annotated[bool, typer.Option("--all-stages", help="Run one rank of every pipeline stage.")]


def check(
    plan: options.PlanFile, rank: Rank = None, all_stages: AllStages = False, as_json: options.AsJson = False
) -> None:
    """Run a plan's training step at full world size on one CPU, without memory, and compare it with the estimate."""
    found = read_plan(plan)
    from galv import api

    answer = api.check(found, rank=rank, all_stages=all_stages)
    sys.stdout.write(answer.to_json() if as_json else f"{answer}\n")
