"""Checkpoints of a training run: weights, optimizer, random states and step, by torch.distributed.checkpoint.

Each checkpoint is a folder `step-00000100`, written beside as `.partial` and renamed when it is complete: whatever
happens, the newest complete one stays. Tensors are saved under the model's own names in the shards that ranks hold, so
a run can go on under another plan for the same model: only fused projections, which a tensor axis cuts chunk by chunk,
would come back in another order under another tensor degree, and are refused.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from galv.errors import RunError, UsageError
from galv.planner.plan import Plan
from galv.runtime.checkpoint_files import LOCK, PLAN, complete_checkpoints, take
from galv.runtime.module import ParallelModule

_PATIENCE_SECONDS = 5.0
"""How long a file that rank 0 wrote may take to be seen from other nodes."""


class CheckpointFolder:
    """The checkpoints of one run. Every rank calls the same methods in the same order; all must see the folder.

    `save` and `resume` take the folder for this run until its process ends. Both raise UsageError, on every rank, when
    another run has it, when it cannot be written, and when it is not on a disk that all ranks see.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self._folder, self._keep = Path(folder), keep
        self._claimed = False
        self._lock: TextIO | None = None
        """On rank 0, open for as long as the run has the folder."""

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, by step."""
        return complete_checkpoints(self._folder)

    def save(self, step: int, module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        """Saves the run after `step`, whole or not at all, and drops the oldest checkpoints.

        Raises RunError, on every rank, when it cannot be written; those before it stay.
        """
        self._claim()
        final = self._folder / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        try:
            self._on_rank_0(lambda: _emptied(partial))
            dcp.save(_state(module, optimizer), checkpoint_id=partial)
            self._on_rank_0(lambda: _completed(partial, final, module.plan))
        except (OSError, dcp.api.CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise RunError(self._not_saved(step, error)) from error
        self._on_rank_0(self._drop_oldest)

    def resume(self, module: ParallelModule, optimizer: torch.optim.Optimizer) -> int:
        """The step that the newest complete checkpoint was saved after, which is loaded; 0 when there is none.

        Raises UsageError when it is of another model or optimizer, or of a plan that cannot be gone on from, and
        RunError when it cannot be read.
        """
        self._claim()
        found = [self.complete()[-1:] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        if not found[0]:
            return 0
        ((step, folder),) = found[0]
        try:
            _load(folder, module, optimizer)
        except (OSError, EOFError, pickle.UnpicklingError, dcp.api.CheckpointException) as error:
            raise RunError(
                f"cannot read the checkpoint {folder}: {_cause(error)}; remove that folder to go on from the one "
                "before it, or to begin anew"
            ) from error
        return int(step)

    def _claim(self) -> None:
        """Takes the folder for this run, and clears it of what a stopped run has left half written."""
        if self._claimed:
            return
        obstacle: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                self._lock = take(self._folder)
            except OSError as error:
                obstacle = [_cause(error)]
        dist.broadcast_object_list(obstacle)
        if obstacle[0] is None:
            sees: list[bool] = [True] * dist.get_world_size()
            dist.all_gather_object(sees, _appears(self._folder / LOCK))
            if False in sees:
                obstacle[0] = f"rank {sees.index(False)} does not see it; it must be on a disk that all nodes share"
        if obstacle[0] is not None:
            raise UsageError(f"cannot keep checkpoints in {self._folder}: {obstacle[0]}")
        self._claimed = True

    def _drop_oldest(self) -> None:
        for _, folder in self.complete()[: -self._keep]:
            shutil.rmtree(folder)

    def _not_saved(self, step: int, error: BaseException) -> str:
        complete = self.complete()
        last = f"the last complete one is {complete[-1][1]}" if complete else "there is none before it"
        free = shutil.disk_usage(self._folder).free / 2**30
        return (
            f"cannot save a checkpoint after step {step} in {self._folder}: {_cause(error)}; "
            f"its disk has {free:.2f} GiB free; {last}"
        )

    def _on_rank_0(self, action: Any) -> None:
        """Runs `action` on rank 0 while the others wait; what it raises is raised everywhere."""
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                failure = [_cause(error)]
        dist.broadcast_object_list(failure)
        if failure[0] is not None:
            raise OSError(failure[0])


def _appears(path: Path) -> bool:
    """Whether the file is there, or comes within a moment."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _completed(partial: Path, final: Path, plan: Plan) -> None:
    (partial / PLAN).write_text(plan.to_json(), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _cause(error: BaseException) -> str:
    """The reason in one line; of a collective failure that of its first rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"{_cause(first)} (rank {rank})"
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    # What torch says when a file takes no more bytes.
    return "a file could not be written to its end" if "inline_container" in text else text


# ----------------------------------------------------------------------------------------------- what is saved


def _state(module: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{name}": tensor.detach() for name, tensor in module.own_tensors().items()}
    for name, key, value in _optimizer_entries(module, optimizer):
        state[f"optimizer.{name}.{key}"] = value
    for i, random in enumerate(module.random_states):
        state[f"random.{dist.get_rank()}.{i}"] = random
    state["loss_scale"] = torch.tensor(module.loss_scale_state, dtype=torch.float64)
    return state


def _optimizer_entries(module: ParallelModule, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    for name, parameter in _parameters(module):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield name, key, value


def _parameters(module: ParallelModule) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of this rank once, under its first name."""
    seen: set[int] = set()
    for name, tensor in module.own_tensors().items():
        if isinstance(tensor, nn.Parameter) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


# ----------------------------------------------------------------------------------------------- what is loaded


def _load(folder: Path, module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    old = Plan.from_json((folder / PLAN).read_text(encoding="utf-8"))
    _check(old, module.plan, folder)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _make_optimizer_state(module, optimizer, saved)
    state = _state(module, optimizer)
    wanted = {key: value for key, value in state.items() if not key.startswith("random.") or key in saved}
    dcp.load(wanted, checkpoint_id=folder)
    for name, key, value in list(_optimizer_entries(module, optimizer)):
        if not isinstance(value, Tensor):
            parameter = dict(_parameters(module))[name]
            optimizer.state[parameter][key] = wanted[f"optimizer.{name}.{key}"]
    if old.num_devices == module.plan.num_devices:
        module.random_states = tuple(
            wanted.get(f"random.{dist.get_rank()}.{i}", now) for i, now in enumerate(module.random_states)
        )
    value, good_steps = wanted["loss_scale"].tolist()
    module.loss_scale_state = value, int(good_steps)


def _make_optimizer_state(module: ParallelModule, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Gives every parameter the state entries that the checkpoint has for it, to be filled."""
    by_parameter: dict[str, list[str]] = {}
    for entry in saved:
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            by_parameter.setdefault(name, []).append(key)
    for name, parameter in _parameters(module):
        for key in by_parameter.get(name, []):
            kind = saved[f"optimizer.{name}.{key}"]
            if not isinstance(kind, TensorStorageMetadata):
                optimizer.state[parameter][key] = None
            elif kind.size == parameter.shape:
                optimizer.state[parameter][key] = torch.zeros_like(parameter, dtype=kind.properties.dtype)
            else:
                optimizer.state[parameter][key] = torch.zeros(kind.size, dtype=kind.properties.dtype)


def _check(old: Plan, new: Plan, folder: Path) -> None:
    for what, before, now in (
        ("model", f"{old.model.name} ({old.model.fingerprint})", f"{new.model.name} ({new.model.fingerprint})"),
        ("optimizer", old.training.optimizer, new.training.optimizer),
        ("precision", old.training.precision, new.training.precision),
    ):
        if before != now:
            raise UsageError(
                f"the checkpoint {folder} is of {what} {before}, but the plan is for {now}; go on with a plan like its "
                f"own ({folder / PLAN}), or name another folder to start anew"
            )
    chunked, now_chunked = _chunked(old), _chunked(new)
    for name in chunked.keys() | now_chunked.keys():
        if chunked.get(name) != now_chunked.get(name):
            raise UsageError(
                f"the checkpoint {folder} holds {name} cut in chunks for tp {chunked.get(name, 1)}, and the plan has "
                f"tp {now_chunked.get(name, 1)}; go on with a plan of its tensor degree ({folder / PLAN})"
            )


def _chunked(plan: Plan) -> dict[str, int]:
    """The tensor degree of every parameter whose parts lie chunk by chunk, by unit and name within it."""
    found = {}
    for unit in plan.units():
        layout = plan.layout_of(unit)
        for module in layout.modules if layout else ():
            for name, change in module.parameters.items():
                if change.source.chunks > 1:
                    found[f"{unit.name}.{module.module}.{name}"] = unit.strategy.tp
    return found
