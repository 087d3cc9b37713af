"""What a user demands of a plan: `require` and `forbid`, read from text and tested against what a search may choose.

A demand is `KEY OP VALUE`, such as `tp=8`, `pp<=4`, `zero=2,3` or `recompute!=full`; a bare KEY means any value but the
neutral one (`offload`, `tp`), and a bare value stands for itself where only one key has it (`ring`, `interleaved`). A
unit's key can be limited to units by a pattern in front: `model.layers.0-9:recompute=full`, `head:tp=8`. Without one it
holds for every unit that has the choice: only blocks recompute or cut the sequence, only units with experts share them
out. Demands are constraints: what cannot be met is an error, nothing is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne
from typing import Any, get_args

from galv.errors import UnknownName, UsageError
from galv.planner.plan import Offload, Recompute, ScheduleName, SequenceMode, Strategy

UNIT_KEYS = (
    "cp", "dp", "dp_replicate", "dp_shard", "ep", "microbatch", "offload", "recompute", "sequence", "tp", "zero",
)  # fmt: skip
PIPELINE_KEYS = ("num_microbatches", "pp", "schedule", "virtual_stages")
_WORDS: dict[str, tuple[str, ...]] = {
    "sequence": get_args(SequenceMode),
    "recompute": get_args(Recompute),
    "schedule": get_args(ScheduleName),
    "offload": ("none", *get_args(Offload)),
}
"""Keys whose values are words; all others are numbers."""
_NEUTRAL: dict[str, Any] = {"zero": 0, "sequence": "none", "recompute": "none", "schedule": "none", "offload": "none"}
"""The value of a key that asks for nothing; 1 where not listed."""
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"=": eq, "!=": ne, "<=": le, ">=": ge, "<": lt, ">": gt}
_FORM = re.compile(r"(?:(?P<pattern>[^:]+):)?(?P<key>[\w-]+)(?:(?P<operator><=|>=|!=|=|<|>)(?P<values>[^<>=!]+))?")


@dataclass(frozen=True)
class UnitKind:
    """What a demand without a pattern needs to know of a unit."""

    name: str
    is_block: bool
    can_recompute: bool
    has_experts: bool

    def has_choice(self, key: str) -> bool:
        """Whether a unit like this can have more than the neutral value of `key`."""
        limited = {"cp": self.is_block, "sequence": self.is_block, "recompute": self.can_recompute}
        return {**limited, "ep": self.has_experts}.get(key, True)


@dataclass(frozen=True)
class PipelineChoice:
    """What the outer search chooses."""

    pp: int
    schedule: ScheduleName
    virtual_stages: int
    num_microbatches: int


@dataclass(frozen=True)
class Demand:
    """One constraint. `text` is what the user wrote."""

    text: str
    pattern: str | None
    key: str
    operator: str
    values: tuple[Any, ...]
    forbidden: bool

    def governs(self, unit: UnitKind) -> bool:
        """Whether the demand is about `unit`."""
        if self.key in PIPELINE_KEYS:
            return False
        return unit.has_choice(self.key) if self.pattern is None else matches(self.pattern, unit.name)

    def allows(self, value: Any) -> bool:
        """Whether a choice may have `value` for the key; for `offload` all that is offloaded, as a tuple."""
        found = (value or ("none",)) if self.key == "offload" else (value,)
        test = _OPERATORS[self.operator]
        if self.operator == "!=":
            said = all(test(one, wanted) for one in found for wanted in self.values)
        else:
            said = any(test(one, wanted) for one in found for wanted in self.values)
        return said != self.forbidden

    def __str__(self) -> str:
        return f"--{'forbid' if self.forbidden else 'require'} {self.text}"


@dataclass(frozen=True)
class Constraints:
    """All that a user demands; empty by default."""

    demands: tuple[Demand, ...] = ()

    def of_unit(self, unit: UnitKind) -> tuple[Demand, ...]:
        """The demands about `unit`: units of one class with the same demands are interchangeable."""
        return tuple(demand for demand in self.demands if demand.governs(unit))

    def allow_pipeline(self, choice: PipelineChoice) -> bool:
        """Whether the outer search may choose `choice`."""
        return self.pipeline_obstacle(choice) is None

    def pipeline_obstacle(self, choice: PipelineChoice) -> Demand | None:
        """The first demand that `choice` does not meet."""
        pipeline = (demand for demand in self.demands if demand.key in PIPELINE_KEYS)
        return next((demand for demand in pipeline if not demand.allows(getattr(choice, demand.key))), None)

    def check(self, units: Sequence[UnitKind]) -> None:
        """Nothing, when every demand is about something. Raises UsageError for one about no unit."""
        for demand in self.demands:
            if demand.key not in PIPELINE_KEYS and not any(demand.governs(unit) for unit in units):
                raise UsageError(_about_nothing(demand, units))


def strategy_obstacle(demands: Iterable[Demand], strategy: Strategy, microbatch: int) -> Demand | None:
    """The first of `demands` that a unit with `strategy` and `microbatch` samples at once does not meet."""
    for demand in demands:
        value = microbatch if demand.key == "microbatch" else getattr(strategy, demand.key)
        if not demand.allows(value):
            return demand
    return None


def read_constraints(require: Iterable[str] = (), forbid: Iterable[str] = ()) -> Constraints:
    """The constraints that texts spell. Raises UsageError for a text that spells none, naming what there is."""
    required = [_read(text, forbidden=False) for text in require]
    return Constraints((*required, *(_read(text, forbidden=True) for text in forbid)))


def matches(pattern: str, name: str) -> bool:
    """Whether a unit's name matches: `*` and `?` as in file names; `layers.0-9` means the numbers from 0 to 9."""
    span = re.fullmatch(r"(.*?)(\d+)-(\d+)", pattern)
    if span is None:
        return fnmatchcase(name, pattern)
    stem, dot, number = name.rpartition(".")
    if not number.isdigit() or not fnmatchcase(stem + dot, span[1]):
        return False
    return int(span[2]) <= int(number) <= int(span[3])


# ----------------------------------------------------------------------------------------------- reading


def _read(text: str, *, forbidden: bool) -> Demand:
    found = _FORM.fullmatch("".join(text.split()))
    if found is None:
        raise UsageError(
            f"{text!r} is no constraint: write KEY=VALUE (or <=, >=, <, >, !=), such as tp=8 or pp<=4, with UNITS: in "
            f"front to limit it to some. Keys: {', '.join(sorted((*UNIT_KEYS, *PIPELINE_KEYS)))}"
        )
    pattern, key, operator, values = found["pattern"], found["key"], found["operator"], found["values"]
    if key not in UNIT_KEYS + PIPELINE_KEYS:
        key, operator, values = _word(text, key, operator)
    if pattern is not None and key in PIPELINE_KEYS:
        raise UsageError(f"{text!r}: {key} is of the whole plan, so no units can stand in front of it")
    if operator is None:
        return Demand(text, pattern, key, "!=", (_NEUTRAL.get(key, 1),), forbidden)
    if key in _WORDS and operator not in ("=", "!="):
        raise UsageError(f"{text!r}: {key} is one of {', '.join(_WORDS[key])}; compare it by = or !=")
    return Demand(text, pattern, key, operator, _values(text, key, values), forbidden)


def _word(text: str, word: str, operator: str | None) -> tuple[str, str, str]:
    """A bare value as `KEY=VALUE`."""
    keys = [key for key, words in _WORDS.items() if word in words and word != "none"]
    if operator is not None or len(keys) != 1:
        raise UnknownName(f"key in {text!r}:", word, (*UNIT_KEYS, *PIPELINE_KEYS))
    return keys[0], "=", word


def _values(text: str, key: str, values: str) -> tuple[Any, ...]:
    parts = values.split(",")
    if key in _WORDS:
        for part in parts:
            if part not in _WORDS[key]:
                raise UnknownName(key, part, _WORDS[key])
        return tuple(parts)
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{text!r}: {key} is a whole number, or several with commas between, not {values!r}")
    return tuple(int(part) for part in parts)


def _about_nothing(demand: Demand, units: Sequence[UnitKind]) -> str:
    if demand.pattern is not None:
        names = [unit.name for unit in units]
        shown = ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])
        return f"{demand}: no unit matches {demand.pattern!r}; the units are {shown}"
    return f"{demand}: no unit of this model has a choice of {demand.key}"
