"""What a long computation tells whoever watches it. The base class says nothing; planning never prints.

The command line shows these events as a progress line, tests record them, everyone else passes nothing.
"""

from __future__ import annotations


class Reporter:
    """Listens to a search and does nothing; subclass it to show or record what happens."""

    def phase(self, name: str) -> None:
        """A new part of the work begins: `name` in a few words, such as "tracing the model"."""

    def progress(self, done: int, total: int) -> None:
        """`done` of `total` steps of the current phase are complete; `total` may change between calls."""

    def standing(self, text: str) -> None:
        """How the current phase stands, such as "best 8.85 s, at most 2 % from optimal"; in place of what stood."""

    def note(self, text: str) -> None:
        """One fact worth a line of its own, such as a better plan that was found."""
