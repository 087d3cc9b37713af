"""Every error that galv raises on purpose.

    GalvError
    ├── UsageError          (ValueError)  a request that cannot be meant: bad sizes, bad files, unknown names
    │   ├── UnknownName                   a name outside a list; carries and prints the valid ones
    │   ├── ModelError                    the model cannot be built, or traced, or is not the plan's
    │   ├── ClusterError                  a cluster or profile that cannot be read or is inconsistent
    │   └── PlanFileError                 a plan file that is cut short, malformed or of another version
    ├── NoFeasiblePlan                    nothing in the space fits; carries the smallest budget that would
    └── RunError                          a training run that failed on purpose: wrong world size, full disk
        └── Diverged                      a loss, or a norm of gradients, that is not a number

The command line prints the message of a `GalvError` and exits with status 2; anything else is a fault of galv's.
Messages name what was given, what was needed and what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GalvError(Exception):
    """The root: one clear message for a person."""


class UsageError(GalvError, ValueError):
    """The request itself is wrong: sizes that do not divide, options that exclude each other."""


class UnknownName(UsageError):
    """A name that is not in the list it should come from; the message lists the valid names."""

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        self.kind, self.name, self.valid = kind, name, tuple(sorted(valid))
        close = difflib.get_close_matches(name, self.valid, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{guess} Known: {', '.join(self.valid)}")


class ModelError(UsageError):
    """The model cannot be built or traced, or it is not the model that a plan was made for."""


class ClusterError(UsageError):
    """A cluster or a device profile that cannot be read or contradicts itself."""


class PlanFileError(UsageError):
    """A plan file that is missing, cut short, malformed or of another schema version."""


class NoFeasiblePlan(GalvError):
    """No plan of the searched space fits the memory budget.

    `smallest_budget_bytes` is the least budget per device under which some plan fits, or None when no budget would
    help; `causes` says, one line each, where the memory went in the closest plan.
    """

    def __init__(self, message: str, *, smallest_budget_bytes: int | None, causes: tuple[str, ...] = ()) -> None:
        self.message, self.smallest_budget_bytes, self.causes = message, smallest_budget_bytes, causes
        super().__init__("\n  ".join((message, *causes)))


class RunError(GalvError):
    """A training run that cannot start or go on: wrong world size, a full disk, a loss that is not a number."""


class Diverged(RunError):
    """A loss, or a norm of gradients, that is not a number: training on would only spoil the weights."""
