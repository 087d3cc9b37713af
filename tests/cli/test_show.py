"""`galv show`, and the files that are no plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import galv
from galv.planner.plan import Plan, ScheduleName
from tests.cli.conftest import Galv, small_plan
from tests.plans import hand_made_plan, tiny_llama

TINY = Path(__file__).parents[2] / "configs" / "models" / "llama-tiny.json"


def test_show_prints_the_table(run_galv: Galv, plan_file: Path) -> None:
    """The table of the plan in the file."""
    assert run_galv("show", plan_file).out == f"{small_plan()}\n"


def test_show_json_prints_the_plan(run_galv: Galv, plan_file: Path) -> None:
    """--json gives the plan back whole."""
    result = run_galv("show", plan_file, "--json")

    assert Plan.from_json(result.out) == small_plan()


@pytest.mark.parametrize(
    ("schedule", "stages", "virtual_stages", "bubble"),
    [("1f1b", (2, 3), 1, "33.3 %, 33.3 %"), ("zbv", (1, 2, 1, 1), 2, None), ("interleaved", (1, 2, 1, 1), 2, None)],
)
def test_show_draws_the_timeline(
    run_galv: Galv, tmp_path: Path, schedule: ScheduleName, stages: tuple[int, ...], virtual_stages: int, bubble: str
) -> None:
    """--timeline writes a Chrome trace of every rank's operations, and says how long each one waits."""
    plan = hand_made_plan(
        tiny_llama(), stages=stages, schedule=schedule, num_microbatches=2, virtual_stages=virtual_stages
    )
    times = {"forward_seconds": 1.0, "backward_seconds": 2.0, "weight_seconds": 1.0}
    ranks = tuple(stage.model_copy(update=times) for stage in plan.estimate.stages)
    plan = plan.model_copy(update={"estimate": plan.estimate.model_copy(update={"stages": ranks})})
    plan.save(tmp_path / "plan.json")
    result = run_galv("show", tmp_path / "plan.json", "--timeline", tmp_path / "trace.json")

    assert result.out == f"{plan}\n"
    assert bubble is None or f"bubble of each pipeline rank: {bubble}" in result.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {"forward", "input", "weight"} if schedule == "zbv" else {"forward", "backward", "weight"}
    assert {event["cat"] for event in events if event["ph"] == "X"} == kinds | {"bubble"}
    assert {event["tid"] for event in events} == {0, 1}


def _cut_short(text: str) -> bytes:
    return text[: len(text) // 2].encode()


def _another_version(text: str) -> bytes:
    return text.replace('"schema_version": 1', '"schema_version": 99').encode()


def _not_text(text: str) -> bytes:
    return b"\xff\xfe\x00\x01"


def _not_a_plan(text: str) -> bytes:
    return b"[1, 2]"


def _wrong_field(text: str) -> bytes:
    return text.replace('"global_batch": 2', '"global_batch": 3').encode()


def _wrong_type(text: str) -> bytes:
    return text.replace('"global_batch": 2', '"global_batch": "2"').encode()


def _no_estimate(text: str) -> bytes:
    data = json.loads(text)
    data["estimate"]["stages"] = []
    return json.dumps(data).encode()


@pytest.mark.parametrize("command", ["show", "run"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_cut_short, "cut short"),
        (_another_version, "99"),
        (_not_text, "not text"),
        (_not_a_plan, "schema version"),
        (_wrong_field, "global batch 3"),
        (_wrong_type, "training.global_batch"),
        (_no_estimate, "estimate.stages: 0 for 1 stages"),
    ],
)
def test_a_spoilt_plan_file_is_refused(
    run_galv: Galv, plan_file: Path, command: str, spoil: Callable[[str], bytes], says: str
) -> None:
    """A file cut short, of another version, or that is no plan: one message that names the file, status 2."""
    plan_file.write_bytes(spoil(plan_file.read_text()))
    result = run_galv(command, plan_file)

    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("galv: ") and str(plan_file) in result.err and says in result.err


@pytest.mark.parametrize("command", ["show", "run"])
def test_a_missing_plan_file_is_refused(run_galv: Galv, tmp_path: Path, command: str) -> None:
    """A path where nothing is, or a folder, is named."""
    for path in (tmp_path / "nothing.json", tmp_path):
        result = run_galv(command, path)

        assert result.status == 2
        assert result.err.startswith(f"galv: cannot read the plan file {path}: ")


def test_a_unit_is_explained(run_galv: Galv, tmp_path: Path) -> None:
    """--explain traces the plan's model again and says what binds; a plan from an object needs that object."""
    path = tmp_path / "plan.json"
    plan = galv.plan(str(TINY), cluster="cpu:2x1", seq_len=16, global_batch=4)
    plan.save(path)

    said = run_galv("show", path, "--explain", "model.layers.0")
    assert said.status == 0
    assert said.out.startswith("model.layers.0 (stage 0): ")
    assert " binds: " in said.out
    data = json.loads(run_galv("show", path, "--explain", "head", "--json").out)
    assert data["unit"] == "head"
    assert data["strategy"]["tp"] == 1
    assert "its units are embedding" in run_galv("show", path, "--explain", "tail").err

    nameless = plan.model_copy(update={"model": plan.model.model_copy(update={"source": None})})
    nameless.save(path)
    assert "galv.explain(plan, unit, model=...)" in run_galv("show", path, "--explain", "head").err
    assert str(galv.explain(nameless, "head", model=str(TINY))) == str(galv.explain(plan, "head"))
