"""A run that is stopped and resumed goes on as if it had not been, also under another plan."""

from __future__ import annotations

import fcntl
import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import galv
from galv.errors import RunError, UsageError
from galv.planner.plan import Plan
from galv.runtime.checkpoint import CheckpointFolder
from galv.runtime.module import ParallelModule
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, random_batch

pytestmark = pytest.mark.slow

GLOBAL_BATCH = 8
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {"micro_batch": 4}),
    "ddp": (2, {}),
    "zero3": (2, {"zero": 3, "micro_batch": 2}),
    "tp2 x zero1": (4, {"tp": 2, "zero": 1, "micro_batch": 2}),
    "pp2 x zero2": (4, {"pp": 2, "zero": 2, "micro_batch": 2}),
    "ep2 x zero3": (4, {"ep": 2, "zero": 3}),
    "ep4": (4, {"ep": 4}),
}


def plan_of(model: str, layout: str) -> Plan:
    world, sizes = LAYOUTS[layout]
    return galv.estimate(
        MODELS[model](),
        random_batch(2, 0),
        cluster=f"cpu:{world}x1",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        **sizes,  # type: ignore[arg-type]  # each is a keyword of estimate
    )


def made(model: str, text: str) -> tuple[ParallelModule, torch.optim.Optimizer]:
    with torch.device("meta"):
        meta = MODELS[model]()
    module = galv.parallelize(meta, Plan.from_json(text), seed=1)
    return module, module.optimizer("adamw", lr=1e-2, eps=1e-4)


def trained(module: ParallelModule, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(float(module.train_step(module.shard_batch(random_batch(GLOBAL_BATCH, step)))))
        module.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save_after(model: str, text: str, folder: str, steps: int, more: int) -> list[float]:
    """Trains, saves, and trains on: the losses after the checkpoint."""
    module, optimizer = made(model, text)
    trained(module, optimizer, 0, steps)
    CheckpointFolder(Path(folder)).save(steps, module, optimizer)
    return trained(module, optimizer, steps, steps + more)


def resume(model: str, text: str, folder: str, more: int) -> tuple[int, list[float]]:
    """The step that was found and the losses after it."""
    module, optimizer = made(model, text)
    step = CheckpointFolder(Path(folder)).resume(module, optimizer)
    return step, trained(module, optimizer, step, step + more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resuming_gives_the_unbroken_losses(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Under the same plan, to the last bit."""
    model = "mixtral" if layout.startswith("ep") else "gpt2"
    plan = plan_of(model, layout)
    unbroken = pool.run(save_after, plan.num_devices, model, plan.to_json(), str(tmp_path), 2, 2)

    resumed = pool.run(resume, plan.num_devices, model, plan.to_json(), str(tmp_path), 2)

    assert resumed == [(2, losses) for losses in unbroken]


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2 x zero1", "zero3"), ("zero3", "pp2 x zero2"), ("ddp", "one"), ("ep2 x zero3", "zero3"), ("zero3", "ep4")],
)
def test_a_run_goes_on_under_another_plan(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    """Weights and moments are those of before, in other shards on other ranks."""
    model = "mixtral" if "ep" in before + after else "llama"
    old, new = plan_of(model, before), plan_of(model, after)
    unbroken = pool.run(save_after, old.num_devices, model, old.to_json(), str(tmp_path), 2, 2)

    resumed = pool.run(resume, new.num_devices, model, new.to_json(), str(tmp_path), 2)

    for step, losses in resumed:
        assert step == 2
        assert losses == pytest.approx(unbroken[0], rel=1e-4)


def refusals(model: str, text: str, folder: str) -> str:
    module, optimizer = made(model, text)
    try:
        CheckpointFolder(Path(folder)).resume(module, optimizer)
    except UsageError as error:
        return str(error)
    return ""


def test_what_cannot_be_gone_on_from_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Another model, and a fused projection in other chunks, on every rank."""
    plan = plan_of("gpt2", "tp2 x zero1")
    pool.run(save_after, plan.num_devices, "gpt2", plan.to_json(), str(tmp_path), 1, 0)

    for model, said in (("llama", "is of model GPT2LMHeadModel"), ("gpt2", "cut in chunks for tp 2")):
        text = plan_of(model, "zero3").to_json()
        assert all(said in message for message in pool.run(refusals, 2, model, text, str(tmp_path)))


def save_where_it_cannot(text: str, folder: str) -> tuple[list[int], str]:
    module, optimizer = made("llama", text)
    checkpoints = CheckpointFolder(Path(folder), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, module, optimizer)
    full = OSError(28, "No space left on device")
    broken = patch.object(FileSystemWriter, "write_data", side_effect=full) if dist.get_rank() == 1 else nullcontext()
    try:
        with broken:
            checkpoints.save(4, module, optimizer)
    except RunError as error:
        return [step for step, _ in checkpoints.complete()], str(error)
    return [], ""


def test_a_full_disk_leaves_the_last_complete_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Every rank hears of the cause, of which rank, and what is left; the oldest are dropped only by newer ones."""
    for steps, message in pool.run(save_where_it_cannot, 2, plan_of("llama", "zero3").to_json(), str(tmp_path)):
        assert steps == [2, 3]
        assert "No space left on device (rank 1)" in message
        assert "step-00000003" in message
    assert not list(tmp_path.glob("*.partial"))


def reasons(text: str, folder: str) -> str:
    """Why a run cannot go on in `folder`."""
    module, optimizer = made("llama", text)
    try:
        CheckpointFolder(folder).resume(module, optimizer)
    except (RunError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_that_cannot_be_used_is_refused_by_all(pool: Pool, tmp_path: Path) -> None:
    """One in another run's use, and one that cannot be written: before any step, on every rank."""
    text = plan_of("llama", "zero3").to_json()
    (tmp_path / "file").touch()
    with (tmp_path / "in-use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(" (process 7 on there)")
        lock.flush()
        taken = pool.run(reasons, 2, text, str(tmp_path))
    unwritable = pool.run(reasons, 2, text, str(tmp_path / "file" / "below"))

    assert all("UsageError" in said and "another run has it (process 7 on there)" in said for said in taken)
    assert all("UsageError" in said and "Not a directory" in said for said in unwritable)


def test_a_damaged_checkpoint_is_one_message(pool: Pool, tmp_path: Path) -> None:
    """A file that is cut short: which checkpoint, on every rank; half-written ones are cleared away."""
    text = plan_of("llama", "zero3").to_json()
    pool.run(save_after, 2, "llama", text, str(tmp_path), 1, 0)
    (tmp_path / "step-00000009.partial").mkdir()
    file = next((tmp_path / "step-00000001").glob("__1_*.distcp"))
    os.truncate(file, file.stat().st_size // 2)

    for said in pool.run(reasons, 2, text, str(tmp_path)):
        assert said.startswith(f"RunError: cannot read the checkpoint {tmp_path / 'step-00000001'}: ")
        assert "remove that folder" in said
    assert not list(tmp_path.glob("*.partial"))
