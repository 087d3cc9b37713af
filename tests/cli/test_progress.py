"""Progress is for people at a terminal, and on standard error only."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from galv.cli.progress import TerminalReporter, progress, terminal_display
from galv.planner.reporter import Reporter


def _tell(reporter: Reporter) -> None:
    reporter.phase("pricing [layouts]")
    reporter.progress(3, 7)
    reporter.standing("best 0.5 s, at most 2 % from optimal")
    reporter.note("a better plan: 0.5 s [tp2]")


def test_away_from_a_terminal_there_is_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing reaches either stream when standard error is a file."""
    with progress() as reporter:
        _tell(reporter)

    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_phases_counts_and_notes_are_seen() -> None:
    """The phase, how far it is, and notes as they were written, brackets included."""
    stream = io.StringIO()
    with terminal_display(Console(file=stream, width=120, force_terminal=True)) as display:
        _tell(TerminalReporter(display))
        display.refresh()

    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", stream.getvalue())
    assert "a better plan: 0.5 s [tp2]" in text
    assert re.search(r"pricing \[layouts\]: best 0.5 s, at most 2 % from optimal .* 3/7 ", text)
