"""Plan files as the command line meets them: read with a clear refusal, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from galv.errors import PlanFileError, UsageError

if TYPE_CHECKING:
    from galv.planner.plan import Plan


def read_plan(path: Path) -> Plan:
    """The plan in the file at `path`. Raises PlanFileError saying what is wrong with the file."""
    from galv.planner.plan import Plan

    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"cannot read the plan file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is no plan file: it is not text") from error
    except ValueError as error:
        raise PlanFileError(f"{path} is no plan that this galv can read: {error}") from error


def check_writable(path: Path | None, what: str = "the plan") -> None:
    """Nothing, when `what` can be written to `path`. Raises UsageError before any work is spent otherwise."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"cannot write {what} to {path}: it is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"cannot write {what} to {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {what} to {path}: the folder {folder} is not writable")


def write_plan(plan: Plan, path: Path) -> None:
    """Writes `plan` to `path`, whole or not at all. Raises UsageError when the system refuses."""
    try:
        plan.save(path)
    except OSError as error:
        raise UsageError(f"cannot write the plan to {path}: {error.strerror}") from error


def write_text(text: str, path: Path) -> None:
    """Writes `text` to `path`. Raises UsageError when the system refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from error
