"""What a training run took beside what its plan promised: the file that `galv run --record` writes. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from galv.errors import UsageError

RECORD_VERSION: Final = 1


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CollectiveRecord(_Value):
    """Collectives of one kind in one step of rank 0, as torch's profiler saw them."""

    name: str
    count: int = Field(ge=1)
    seconds: float = Field(ge=0)


class StageRecord(_Value):
    """One pipeline rank: the fullest or slowest of its devices. Seconds of one step, all microbatches."""

    busy_seconds: float = Field(ge=0)
    """Forward and backward, exposed communication included, waiting for other stages not."""
    optimizer_seconds: float = Field(ge=0)
    """Clipping and the update."""
    peak_bytes: int = Field(ge=0)


class StagePrediction(StageRecord):
    compute_seconds: float = Field(ge=0)
    """Of `busy_seconds`, what is not exposed communication."""


class RunRecord(_Value):
    """One run."""

    record_version: Literal[1]
    model: str
    cluster: str
    """CLUSTER as the plan has it."""
    devices_per_node: int = Field(ge=1)
    num_nodes: int = Field(ge=1)
    steps: int = Field(ge=1)
    step_seconds: float = Field(gt=0)
    """Median, the first and the profiled step apart."""
    step_spread: float = Field(ge=0)
    predicted_step_seconds: float = Field(gt=0)
    stages: tuple[StageRecord, ...] = Field(min_length=1)
    predicted: tuple[StagePrediction, ...] = Field(min_length=1)
    collectives: tuple[CollectiveRecord, ...] = ()


def read_record(path: Path) -> RunRecord:
    """The record in the file at `path`. Raises UsageError saying what is wrong with it."""
    try:
        return RunRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the record {path}: {error.strerror}; galv run --record {path} makes it"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no record of a run: it is not text") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path} is no record of a run: {place + ': ' if place else ''}{first['msg']}") from error
