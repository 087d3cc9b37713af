"""Samples taken so far, kept in a file beside the profile so that an interrupted measurement goes on. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

Key = tuple[int, str]
"""(processes at work, key of a question)."""


@dataclass
class Samples:
    """Seconds by setting and question. `machine` says what they are of: others' are not mixed in."""

    machine: str
    path: Path | None = None
    seconds: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, key: Key, seconds: float) -> None:
        """One more sample."""
        self.seconds.setdefault(key, []).append(seconds)

    def of(self, key: Key) -> list[float]:
        """The samples of one question so far."""
        return self.seconds.get(key, [])

    def load(self) -> None:
        """Takes up what the file holds, where it is of the same machine; a file that is none counts as empty."""
        if self.path is None or not self.path.is_file():
            return
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            found = {(int(p), key): list(map(float, values)) for p, key, values in data["samples"]}
        except (ValueError, KeyError, TypeError, OSError):
            return
        if data.get("machine") == self.machine:
            self.seconds = found

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.path is None:
            return
        data = {"machine": self.machine, "samples": [[p, key, values] for (p, key), values in self.seconds.items()]}
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(self.path)

    def forget(self) -> None:
        """Removes the file: its content is in the profile."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
