"""What is said when training fails: figures and commands that help to go on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from galv.cli import failure
from galv.cli.failure import is_lost_peer, is_out_of_memory, left, lost_ranks, out_of_memory
from galv.planner import plan as p
from galv.runtime.train_config import TrainConfig
from tests.cli.conftest import FakeApi, Galv, small_plan

ON_CUDA = "CUDA out of memory. Tried to allocate 256.00 KiB. GPU 0 has a total capacity of 139.80 GiB of which ..."
ON_CPU = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


def two_stages() -> p.Plan:
    """A plan of two stages: the first is to hold 1 MiB, the second 2."""
    plan = small_plan()
    estimate = plan.estimate.model_copy(update={"peak_bytes": (2**20, 2 * 2**20)})
    pipeline = p.Pipeline(degree=2, schedule="1f1b")
    return plan.model_copy(update={"estimate": estimate, "pipeline": pipeline})


@pytest.mark.parametrize(
    ("error", "budget"),
    [
        (torch.OutOfMemoryError(ON_CUDA), 2 * 2**20 - 256 * 2**10),
        (RuntimeError(ON_CPU), 2 * 2**20 - 2 * 2**20 / 20),
    ],
)
def test_out_of_memory_names_the_stage_and_plans_with_less(
    error: Exception, budget: float, monkeypatch: pytest.MonkeyPatch, run_galv: Galv, fake_api: FakeApi
) -> None:
    """What was reached stands beside the estimate, and the printed command asks for that much less."""
    monkeypatch.setattr(failure, "_used_bytes", lambda device: 3 * 2**20)
    said = out_of_memory(two_stages(), Path("my plan.json"), 1, error, torch.device("cpu"))
    first, _, command = said.splitlines()

    assert is_out_of_memory(error)
    assert first.startswith("rank 1 (stage 1 of 2) ran out of memory: 0.0029 GiB were in use")
    assert "expects a peak of 0.0020 GiB and may take 1.00 GiB" in first
    words = shlex.split(command)
    assert words[-1] == "my plan.json"
    assert run_galv(*words[1:-2]).status == 0
    assert fake_api.asked is not None
    assert fake_api.asked["memory"] == pytest.approx(budget / 2**30, abs=1e-4)
    wanted = {"model": "small.json", "cluster": "cpu:2x1", "seq_len": 16, "precision": "fp32", "optimizer": "sgd"}
    assert wanted.items() <= fake_api.asked.items()


def test_a_device_that_gives_less_than_planned_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory ends below the estimate, what was there counts; and there may be nothing to take away."""
    monkeypatch.setattr(failure, "_used_bytes", lambda device: 2**20)
    said = out_of_memory(two_stages(), Path("plan.json"), 1, torch.OutOfMemoryError(ON_CUDA), torch.device("cpu"))
    assert float(re.findall(r"--memory (\S+)", said)[0]) == pytest.approx(2**20 / 2**30, abs=1e-4)

    big = torch.OutOfMemoryError("Tried to allocate 80.00 GiB.")
    assert "plan for more devices" in out_of_memory(two_stages(), Path("plan.json"), 0, big, torch.device("cpu"))


def test_a_lost_rank_is_told_from_other_errors() -> None:
    """Errors of gloo and of torch.distributed speak of another rank; a user's own do not."""
    assert is_lost_peer(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"))
    assert is_lost_peer(dist.DistBackendError("NCCL error"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert lost_ranks([1, 3], 8) == "ranks 1, 3 do not answer: stopped, cut off, or stuck for more than 8 s"


def test_what_is_left_is_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """A folder without a plan in it is not complete; a run without checkpoints leaves nothing to speak of."""
    config = TrainConfig.model_validate({"checkpoints": {"folder": str(tmp_path)}})
    assert left(TrainConfig()) == ""
    assert "begins anew" in left(config)
    for step in (2, 4):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00000002" / "plan.json").touch()

    assert left(config).endswith("step-00000002: the same command goes on after step 2")
