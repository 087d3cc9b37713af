"""What a person at a terminal sees while galv plans: one line on standard error that vanishes at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from galv.planner.reporter import Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class TerminalReporter(Reporter):
    """Shows phases and their progress on a rich progress display, and prints notes above it."""

    def __init__(self, display: Progress) -> None:
        self._display = display
        self._task = display.add_task("", total=None)
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        self._display.reset(self._task, description=name, total=None)

    def progress(self, done: int, total: int) -> None:
        self._display.update(self._task, completed=done, total=total)

    def standing(self, text: str) -> None:
        self._display.update(self._task, description=f"{self._phase}: {text}")

    def note(self, text: str) -> None:
        self._display.console.print(text, markup=False, highlight=False)


@contextmanager
def progress() -> Iterator[Reporter]:
    """A reporter for the time of one command: a progress line on a terminal, silence elsewhere."""
    if not sys.stderr.isatty():
        yield Reporter()
        return
    from rich.console import Console

    with terminal_display(Console(stderr=True)) as display:
        yield TerminalReporter(display)


def terminal_display(console: Console) -> Progress:
    """The progress line on `console`; it is drawn while it is entered and vanishes afterwards."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(
        SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
