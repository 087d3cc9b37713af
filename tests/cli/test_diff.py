"""`galv diff` says what differs between two plans, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from galv.planner.plan import Plan
from tests.cli.conftest import Galv, small_plan


def _changed(path: Path, **changes: object) -> Path:
    data = json.loads(small_plan().to_json())
    for place, value in changes.items():
        *way, last = place.split("__")
        at = data
        for step in way:
            at = at[int(step)] if step.isdigit() else at[step]
        at[last] = value
    path.write_text(Plan.from_json(json.dumps(data)).to_json(), encoding="utf-8")
    return path


def test_equal_plans(run_galv: Galv, plan_file: Path) -> None:
    """Nothing differs: one line says so."""
    assert run_galv("diff", plan_file, plan_file).out == "the plans are equal in all that they do\n"


def test_what_differs_is_named_with_both_values(run_galv: Galv, plan_file: Path, tmp_path: Path) -> None:
    """Set-up, strategies and seconds that differ are listed, what is equal is not."""
    other = _changed(
        tmp_path / "other.json",
        training__optimizer="adamw",
        estimate__step_seconds=1.0,
        stages__0__units__0__strategy={"dp_shard": 2, "zero": 3},
    )

    out = run_galv("diff", plan_file, other).out

    assert [line.split() for line in out.splitlines()[:2]] == [["set-up", "A", "B"], ["optimizer", "sgd", "adamw"]]
    assert "head   dp2  dp2 zero3" in out
    step = next(line for line in out.splitlines() if line.startswith("step"))
    assert step.endswith("2.0 times")
    assert "compute" not in out


def test_json(run_galv: Galv, plan_file: Path, tmp_path: Path) -> None:
    """--json gives the same as data."""
    other = _changed(tmp_path / "other.json", training__optimizer="adamw")

    found = json.loads(run_galv("diff", plan_file, other, "--json").out)

    assert found["setup"] == [{"name": "optimizer", "a": "sgd", "b": "adamw"}]
    assert found["strategies"] == found["seconds"] == found["peak_bytes"] == []


def test_a_file_that_is_no_plan(run_galv: Galv, plan_file: Path, tmp_path: Path) -> None:
    """It is refused like everywhere."""
    result = run_galv("diff", plan_file, tmp_path / "none.json")

    assert result.status == 2
    assert "cannot read the plan file" in result.err
