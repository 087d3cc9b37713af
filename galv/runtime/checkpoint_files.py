"""The files of a folder of checkpoints: which are complete, and whose the folder is. Free of torch, for launchers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
from pathlib import Path
from typing import TextIO

_NAME = re.compile(r"step-(\d{8})")
PLAN = "plan.json"
"""In a checkpoint's folder, the plan that it was saved under; written last."""
LOCK = "in-use"
"""Locked by a process for as long as the run lives, and says which that is."""


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, by step."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*")]
    return sorted((int(match[1]), path) for match, path in found if match and (path / PLAN).is_file())


def take(folder: Path) -> TextIO:
    """The lock on `folder` of this process, which has it as long as the file is open.

    The folder is made where it is missing, and cleared of what a stopped run has left half written. Raises OSError when
    another process has it, or when it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        # Not every file system knows locks.
        with contextlib.suppress(OSError):
            _lock(lock)
        lock.truncate(0)
        lock.write(f" (process {os.getpid()} on {platform.node()})")
        lock.flush()
    except _TakenError:
        lock.seek(0)
        with lock:
            reason = f"another run has it{lock.read()}; wait for its end, stop it, or name another folder"
        raise OSError(reason) from None
    for partial in folder.glob("step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    return lock


class _TakenError(Exception):
    """Another process has the lock."""


def _lock(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _TakenError from None
