"""`galv run` from a plan file to trained steps, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import galv
from galv.profiles.run_record import read_record

ROOT = Path(__file__).parents[2]

SCRIPT = r"""
import os
import torch.distributed as dist
import galv
from galv.planner.plan import Plan

dist.init_process_group("gloo")
plan = Plan.from_json(open(os.environ["GALV_PLAN"]).read())
module = galv.parallelize(galv.build_model(plan), plan)
print(f"rank {dist.get_rank()}\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a small Llama for two processes of this machine."""
    model = str(ROOT / "configs/models/llama-tiny.json")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    galv.estimate(model, cluster="cpu:2x1", seq_len=32, global_batch=4, precision="fp32", zero=3).save(path)
    return path


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "galv", "run", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # a script is not in the folder that it is started from
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


def test_steps_are_trained_and_shown_beside_the_estimate(plan_path: Path, tmp_path: Path) -> None:
    """One line a step with a falling loss, then what was measured beside what was estimated; all of it recorded."""
    done = _run(plan_path, "--steps", 3, "--record", tmp_path / "run.json")
    losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d+\.\d+) ", done.stdout, flags=re.MULTILINE)]

    assert (done.returncode, done.stderr) == (0, "")
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert re.search(r"measured +estimated", done.stdout)
    assert all(row in done.stdout for row in ("tokens/s", "peak memory"))
    record = read_record(tmp_path / "run.json")
    assert record.steps == 3
    assert all(stage.busy_seconds > 0 and stage.peak_bytes > 2**20 for stage in record.stages)
    assert any("all_reduce" in collective.name for collective in record.collectives)


def test_a_script_finds_plan_and_model(plan_path: Path, tmp_path: Path) -> None:
    """A user's script makes the plan's model parallel on every rank."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = _run(plan_path, script)

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["0", "1"]


def test_another_model_than_the_plans_is_refused(plan_path: Path, tmp_path: Path) -> None:
    """A model whose fingerprint is not the plan's: one message from all ranks together, status 2."""
    text = plan_path.read_text()
    other = tmp_path / "other.json"
    other.write_text(re.sub(r'"fingerprint": "\w{4}', '"fingerprint": "0000', text))
    done = _run(other, "--steps", 1)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("galv: ") == 1
    assert "another model" in done.stderr


@pytest.mark.slow
def test_a_killed_run_goes_on_by_the_same_command(plan_path: Path, tmp_path: Path) -> None:
    """SIGKILL of a rank ends the run with its name and the last checkpoint; then steps follow that checkpoint."""
    config = {"steps": 5, "checkpoints": {"folder": str(tmp_path / "kept"), "every": 2}, "metrics": {"format": "jsonl"}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config | {"steps": 500}))
    command = [sys.executable, "-m", "galv", "run", str(plan_path), "--config", str(tmp_path / "train.yaml")]
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
        assert run.stdout is not None
        assert any('"step": 3' in line for line in run.stdout)
        os.kill(_process_of_rank(1, run.pid), signal.SIGKILL)
        _, said = run.communicate(timeout=120)
    killed, kept = said.splitlines()
    step = int(re.findall(r"after step (\d+)", kept)[0])
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config | {"steps": step + 1}))
    rest = _run(plan_path, "--config", tmp_path / "train.yaml")

    assert run.returncode == 128 + signal.SIGKILL
    assert killed.startswith("galv: rank 1 was stopped by SIGKILL")
    assert (rest.returncode, rest.stderr) == (0, "")
    assert [json.loads(line).get("step") for line in rest.stdout.splitlines()] == [step + 1, None]


def _process_of_rank(rank: int, launcher: int) -> int:
    """The child of `launcher` that is that rank."""
    lists = Path(f"/proc/{launcher}/task").glob("*/children")
    children = [int(child) for children in lists for child in children.read_text().split()]
    environments = {child: Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    return next(child for child, entries in environments.items() if f"RANK={rank}".encode() in entries)
