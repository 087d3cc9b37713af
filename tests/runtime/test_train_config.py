"""Training configurations: what they say, and clear refusals of what they cannot mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from galv.errors import UsageError
from galv.runtime.train_config import Schedule, read_train_config


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    """Twenty synthetic steps."""
    path = tmp_path / "train.yaml"
    path.write_text("")

    config = read_train_config(path)

    assert (config.steps, config.data.tokens, config.evaluation) == (20, None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepz: 3", "stepz: Extra inputs are not permitted; there are checkpoints, data"),
        ("optimizer: {rate: 1}", "optimizer.rate: Extra inputs are not permitted; there are betas, clip"),
        ("checkpoints: {every: 3}", "checkpoints.folder: Field required"),
        ("steps: 0", "steps: Input should be greater than or equal to 1"),
        ("data: {tokens: a, dataset: b}", "data: give tokens or dataset, not both"),
        ("steps: 5\nschedule: {warmup_steps: 9}", "schedule.warmup_steps is 9 of only 5 steps"),
        ("steps: [", "is no YAML"),
        ("- 1", "valid dictionary"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    """The place in the file, the reason, and the names that are known there."""
    path = tmp_path / "train.yaml"
    path.write_text(text)

    with pytest.raises(UsageError) as error:
        read_train_config(path)

    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_schedules() -> None:
    """Warm-up is linear to the peak at its last step; decay ends at the floor at the last step of all."""
    for kind in ("linear", "cosine"):
        schedule = Schedule(kind=kind, warmup_steps=4, floor=0.1)  # type: ignore[arg-type]
        factors = [schedule.factor(step, 20) for step in range(1, 21)]
        assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
        assert factors[-1] == pytest.approx(0.1)
        assert factors[4:] == sorted(factors[4:], reverse=True)
    assert Schedule(warmup_steps=2).factor(9, 10) == 1.0
    assert Schedule(kind="linear").factor(10, 10) == 0.0
