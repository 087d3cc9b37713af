"""Puts what a command printed into a Markdown file, between the marks that belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def fill(path: Path, name: str, lines: Sequence[str]) -> None:
    """Replaces what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->` in the file by `lines`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text("\n".join([before + begin, "", *lines, "", end + after]), encoding="utf-8")
