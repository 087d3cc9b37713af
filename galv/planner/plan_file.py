"""Plans as files: written so that no reader ever finds a half of one, and refused in words."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path


def write_whole(text: str, path: str | Path) -> None:
    """Makes `text` the content of the file at `path`, whole or not at all.

    A link is followed: what it leads to is replaced. Raises OSError where the system refuses, and where something is
    at `path` that is no regular file (a device, a pipe, a folder): that cannot be replaced without being destroyed.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    partial = target.with_name(f".galv-{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_version(text: str, version: int) -> None:
    """Nothing when `text` is JSON of that schema version. Raises ValueError saying what it is instead."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not complete JSON (line {error.lineno}: {error.msg}); was the file cut short?") from error
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != version:
        raise ValueError(f"schema version {found!r}; this galv reads version {version}")
