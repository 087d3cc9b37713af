"""`galv run` without a script, from the command line to the last line it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import galv

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a tiny Llama on a pipeline of two processes."""
    config = str(ROOT / "configs/models/llama-tiny.json")
    plan = galv.estimate(
        config, cluster="cpu:2x1", seq_len=32, global_batch=4, micro_batch=1, pp=2, precision="fp32", memory=None
    )
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`galv run` with those arguments."""
    command = [sys.executable, "-m", "galv", "run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.timeout(200)
def test_every_step_has_a_line_and_the_end_compares(plan_file: Path) -> None:
    """Rank 0 alone prints a line a step, then what was measured beside the estimate, stage by stage."""
    result = run(str(plan_file), "--steps", "3")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    steps = [words for words in lines if words and words[0].isdigit()]
    assert [words[0] for words in steps] == ["1", "2", "3"]
    assert float(steps[2][1]) < float(steps[0][1])
    comparison = [words for words in lines if words][-5:]
    assert [words[0] for words in comparison] == ["measured", "step", "tokens/s", "peak", "peak"]
    assert [words[3] for words in comparison[-2:]] == ["0", "1"]


@pytest.mark.timeout(200)
def test_a_refusal_is_one_message(plan_file: Path, tmp_path: Path) -> None:
    """A plan whose model is gone ends every rank with status 2 and one message, without a traceback."""
    broken = tmp_path / "plan.json"
    broken.write_text(plan_file.read_text().replace("llama-tiny.json", "nowhere.json"))
    result = run(str(broken))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [f"galv: there is no file {ROOT / 'configs/models/nowhere.json'}"]
