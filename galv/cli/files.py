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
    """Nothing, when `what` can be written to `path`. Raises UsageError before any work is spent otherwise.

    A link is followed. What is there already is replaced only when it is a regular file: no device, pipe or folder.
    """
    if path is None:
        return
    try:
        obstacle = _obstacle(path)
    except OSError as error:
        obstacle = error.strerror
    if obstacle:
        raise UsageError(f"cannot write {what} to {path}: {obstacle}")


def _obstacle(path: Path) -> str | None:
    """What stands against writing to `path`. Raises OSError where the system cannot tell."""
    target = Path(os.path.realpath(path))
    folder = target.parent
    if target.is_symlink():
        return "its links lead round in a circle"
    if path.is_dir():
        return "it is a folder; name a file in it"
    if path.exists() and not path.is_file():
        return "it is no regular file; name a new file, or print to standard output (--json)"
    if path.exists() and not os.access(path, os.W_OK):
        return "the file there is not writable"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK) else f"the folder {folder} is not writable"


def write_plan(plan: Plan, path: Path) -> None:
    """Writes `plan` to `path`, whole or not at all. Raises UsageError when the system refuses."""
    write_text(plan.to_json(), path, "the plan")


def write_text(text: str, path: Path, what: str = "the graph") -> None:
    """Writes `text`, which is `what`, to `path`, whole or not at all. Raises UsageError when the system refuses."""
    from galv.planner.plan_file import write_whole

    try:
        write_whole(text, path)
    except OSError as error:
        raise UsageError(f"cannot write {what} to {path}: {error.strerror}") from error
