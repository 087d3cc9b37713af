"""What the built-in trainer is told: data, optimizer, schedule, evaluation, checkpoints, metrics. Read from YAML."""

from __future__ import annotations

from math import cos, pi
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from galv.errors import UsageError
from galv.planner.plan import Frozen

Positive = Annotated[int, Field(ge=1, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]


class Data(Frozen):
    """Where samples come from: exactly one of `tokens`, `dataset`, or neither for synthetic ones."""

    tokens: str | None = None
    """A file of token ids one after the other: `.npy` (one dim), or raw integers of `dtype`."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Of a raw file."""
    dataset: str | None = None
    """A folder that `datasets.Dataset.save_to_disk` wrote; its rows are joined."""
    column: str = "input_ids"
    shuffle: bool = True

    @model_validator(mode="after")
    def _one(self) -> Data:
        if self.tokens is not None and self.dataset is not None:
            raise ValueError("give tokens or dataset, not both")
        return self


class Evaluation(Data):
    """Samples that are not trained on, looked at now and then."""

    every: Positive = 100
    """Steps."""
    batches: Positive = 8
    """Global batches that one evaluation is the mean of."""
    shuffle: bool = False


class Optimizer(Frozen):
    lr: float = Field(1e-3, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of adamw."""
    eps: float = Field(1e-8, gt=0)
    """Of adamw."""
    momentum: Share = 0.0
    """Of sgd."""
    clip: float = Field(1.0, gt=0)
    """Largest global norm of the gradients."""


class Schedule(Frozen):
    """The learning rate over the steps: a linear warm-up, then constant, or down to `floor` times the peak."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    floor: Share = 0.0

    def factor(self, step: int, steps: int) -> float:
        """What the peak learning rate is multiplied by in `step` (from 1) of `steps`."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        shape = 1 - done if self.kind == "linear" else 0.5 * (1 + cos(pi * done))
        return self.floor + (1 - self.floor) * shape


class Checkpoints(Frozen):
    folder: str
    every: Positive = 100
    """Steps; the last step is always saved."""
    keep: Positive = 2
    """So many of the newest stay."""


class Metrics(Frozen):
    format: Literal["table", "jsonl"] = "table"
    every: Positive = 1
    """Steps."""
    tensorboard: str | None = None
    """A folder for event files; needs tensorboard."""


class TrainConfig(Frozen):
    """A whole training run, beside its plan."""

    steps: Positive = 20
    seed: int = Field(0, ge=0, lt=2**63)
    timeout_seconds: Positive = 600
    """How long ranks wait for each other before the run fails: longer than any step, evaluation or checkpoint."""
    data: Data = Data()
    evaluation: Evaluation | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoints: Checkpoints | None = None
    metrics: Metrics = Metrics()
    weights: str | None = None
    """A folder with a Hugging Face model's safetensors to start from."""
    save_weights: str | None = None
    """A folder to write the trained weights to, in the same form."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(f"schedule.warmup_steps is {self.schedule.warmup_steps} of only {self.steps} steps")
        return self


def read_train_config(path: Path) -> TrainConfig:
    """The configuration in the YAML file at `path`. Raises UsageError naming the place of what is wrong with it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the training configuration {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is no YAML: {error}") from error
    try:
        return TrainConfig.model_validate({} if data is None else data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        known = _fields(first["loc"]) if first["type"] == "extra_forbidden" else ""
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{path}: {f'{place}: ' if place else ''}{message}{known}") from error


_SECTIONS: dict[str, type[Frozen]] = {
    "data": Data,
    "evaluation": Evaluation,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "checkpoints": Checkpoints,
    "metrics": Metrics,
}


def _fields(place: tuple[int | str, ...]) -> str:
    """The names that could stand at `place`."""
    section = TrainConfig if len(place) == 1 else _SECTIONS[str(place[0])]
    return f"; there are {', '.join(sorted(section.model_fields))}"
