"""What is said when training fails: the cause, the rank, and how to go on. Nothing here ends a process."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from galv.planner.plan_table import GIB, gib, size
from galv.runtime.checkpoint_files import complete_checkpoints

if TYPE_CHECKING:
    import torch

    from galv.planner.plan import Plan
    from galv.runtime.train_config import TrainConfig

_LEAST_SHARE = 1 / 20
"""Of the estimate, that a new plan is smaller by at least: so that planning again and again comes to an end."""
_SCALES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def left(config: TrainConfig | None) -> str:
    """What of a run is left to go on from, on a line of its own; empty for a run without checkpoints."""
    if config is None or config.checkpoints is None:
        return ""
    complete = complete_checkpoints(Path(config.checkpoints.folder))
    if not complete:
        return "\nno checkpoint was complete: the same command begins anew"
    step, folder = complete[-1]
    return f"\nthe last complete checkpoint is {folder}: the same command goes on after step {step}"


# ----------------------------------------------------------------------------------------------- lost ranks


def is_lost_peer(error: BaseException) -> bool:
    """Whether it says that another rank has gone, or has not answered in time."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(r"/gloo/|by peer|Broken pipe", str(error)) is not None
    )


def lost_ranks(missing: list[int], waited_seconds: float) -> str:
    """What a rank says of those that have neither failed with it nor spoken."""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "another rank"
    verb = "do" if len(missing) > 1 else "does"
    return f"{who} {verb} not answer: stopped, cut off, or stuck for more than {waited_seconds:.0f} s"


# ----------------------------------------------------------------------------------------------- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that a device, or the CPU's allocator, has no memory left."""
    import torch

    allocator = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and allocator in str(error)
    )


def out_of_memory(plan: Plan, path: Path, rank: int, error: BaseException, device: torch.device) -> str:
    """What `rank` says when it has run out of memory under `plan`: its stage, the figures, the command for less.

    The new plan must be smaller by what could not be had. It is planned for less than the old estimate, and not less
    than the old budget, since an estimate that was too small for one plan will be for the next one too.
    """
    requested, used = _requested_bytes(error), _used_bytes(device)
    stage = rank * plan.pipeline.degree // plan.num_devices
    place = f"rank {rank} (stage {stage} of {plan.pipeline.degree})" if plan.pipeline.degree > 1 else f"rank {rank}"
    estimated = plan.estimate.peak_bytes[stage]
    asked = f" and {size(requested)} more were asked for" if requested else ""
    said = (
        f"{place} ran out of memory: {gib(used)} GiB were in use{asked}; "
        f"the plan expects a peak of {gib(estimated)} GiB and may take {gib(plan.cluster.memory_budget_bytes)} GiB"
    )
    budget = min(estimated, used + requested) - max(requested, round(estimated * _LEAST_SHARE))
    return f"{said}\n{_again(plan, path, budget)}"


def _again(plan: Plan, path: Path, budget_bytes: int) -> str:
    """How to plan the same training for another budget."""
    if budget_bytes <= 0:
        return "no smaller budget would do: plan for more devices, or with a smaller global batch"
    memory = f"{budget_bytes / GIB:.2f}" if budget_bytes >= GIB else f"{budget_bytes / GIB:.4f}"
    if plan.model.source is None:
        return f"plan again with memory={memory}"
    training = plan.training
    options = {
        "--cluster": plan.cluster.spec,
        "--seq-len": training.seq_len,
        "--global-batch": training.global_batch,
        "--precision": training.precision,
        "--optimizer": training.optimizer,
        "--inputs": plan.model.inputs_source,
        "--memory": memory,
        "-o": path,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return f"plan again for less:\n  galv plan {shlex.join([plan.model.source, *words])}"


def _requested_bytes(error: BaseException) -> int:
    """What was asked for in vain, 0 when the message does not say."""
    match = re.search(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error), flags=re.IGNORECASE)
    return 0 if match is None else round(float(match[1]) * _SCALES[match[2]])


def _used_bytes(device: torch.device) -> int:
    """What the device holds, whoever has it; on the CPU, what this process has held at most."""
    import torch

    from galv.runtime.trainer import peak_bytes

    if device.type != "cuda":
        return peak_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
