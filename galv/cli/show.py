"""`galv show`: print a plan file."""

from __future__ import annotations

from galv.cli import options
from galv.cli.files import read_plan
from galv.cli.output import deliver


def show(plan: options.PlanFile, as_json: options.AsJson = False) -> None:
    """Print a plan file."""
    deliver(read_plan(plan), output=None, as_json=as_json)
