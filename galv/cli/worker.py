"""One rank of `galv run` without a script: trains the plan's model and reports beside the estimate.

Started by torchrun, or as one task of a Slurm step, as `python -m galv.cli.worker PLAN [--config FILE] [--steps N]
[--seed S]`. Rank 0 speaks. A refusal is one message from one rank and exit status 2 from all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from galv import api
from galv.cli.failure import is_lost_peer, is_out_of_memory, left, lost_ranks, out_of_memory
from galv.cli.files import read_plan, write_text
from galv.cli.record import recorded
from galv.cli.told import Told
from galv.errors import Diverged, GalvError
from galv.planner.plan import Plan
from galv.runtime.session import Session
from galv.runtime.step_profile import StepProfile
from galv.runtime.train_config import TrainConfig, read_train_config
from galv.runtime.weights import open_weights

_MEETING = timedelta(minutes=10)
"""How long a rank waits at the beginning for the others to come."""
_GRACE_SECONDS = 2.0
"""How long a rank stays after another has begun to say what went wrong: the launcher ends all when one leaves."""
_LOST_SECONDS = 10.0
"""How long a rank that has lost another one keeps silent: a launcher knows better which one has failed, and how."""


def main() -> None:
    """Runs this rank and leaves the process with its status."""
    options = _options()
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=_MEETING)))
    plan = config = None
    device = torch.device("cpu")
    try:
        plan, config = read_plan(options.plan), _config(options)
        device = _join(store, rank, world_size, timedelta(seconds=config.timeout_seconds))
        _run(plan, config, rank, options.record)
        dist.destroy_process_group()
    except Diverged as error:
        _refuse(store, f"{error}{left(config)}")
    except GalvError as error:
        _refuse(store, str(error))
    except KeyboardInterrupt:
        os._exit(130)  # whoever interrupts torchrun interrupts every rank
    except Exception as error:
        if plan is not None and is_out_of_memory(error):
            _refuse(store, out_of_memory(plan, options.plan, rank, error, device) + left(config))
        if config is not None and is_lost_peer(error):
            _be_lost(store, rank, world_size, config)
        raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="galv.cli.worker", description="One rank of `galv run`.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--config", type=Path, help="of the training; steps and seed given here count more")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


def _config(options: argparse.Namespace) -> TrainConfig:
    config = TrainConfig() if options.config is None else read_train_config(options.config)
    told = {name: value for name in ("steps", "seed") if (value := getattr(options, name)) is not None}
    return TrainConfig.model_validate(config.model_dump() | told)


def _join(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> torch.device:
    """This rank's device; makes the default process group, NCCL where there are GPUs, gloo elsewhere.

    On a CPU, each rank takes a fair share of the cores.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        num_neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_neighbours))
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")


def _run(plan: Plan, config: TrainConfig, rank: int, record: Path | None) -> None:
    weights = None if config.weights is None else open_weights(config.weights)
    module = api.parallelize(api.build_model(plan), plan, seed=config.seed, weights=weights)
    session = Session(module, config)
    profile = StepProfile(0 if record is None else config.steps - session.done_steps)
    records = profile.around(session.records())
    if rank == 0:
        told = Told(plan, config, session.done_steps)
        seen = list(told.while_training(records))
    else:
        seen = list(records)
    if record is not None:
        kept = recorded(plan, seen, profile, module.device)
        if kept is not None:
            write_text(kept.model_dump_json(indent=1) + "\n", record, "the record")
    peaks = _peaks(plan, seen[-1].peak_bytes, module.device)
    if rank == 0:
        told.at_the_end(seen, peaks)


def _peaks(plan: Plan, own_bytes: int, device: torch.device) -> list[int]:
    """The fullest rank's peak of each stage. Collective."""
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    peaks[dist.get_rank()] = own_bytes
    dist.all_reduce(peaks)
    return [int(stage.max()) for stage in peaks.chunk(plan.pipeline.degree)]


# ----------------------------------------------------------------------------------------------- how a rank leaves


def _refuse(store: dist.Store, message: str) -> NoReturn:
    """Leaves with status 2; the first rank that comes here says why."""
    if _num_refusals(store, more=1) == 1:
        print(f"galv: {message}", file=sys.stderr, flush=True)
    _leave()


def _be_lost(store: dist.Store, rank: int, world_size: int, config: TrainConfig) -> NoReturn:
    """Leaves after another rank has gone. Says so only when, for a while, neither that rank nor a launcher has."""
    _try(lambda: store.set(_lost_key(rank), ""))
    deadline = time.monotonic() + _LOST_SECONDS
    while time.monotonic() < deadline:
        if _num_refusals(store, more=0) > 0:
            _leave()
        time.sleep(0.2)
    missing = [r for r in range(world_size) if not _try(lambda r=r: store.check([_lost_key(r)]))]  # type: ignore[misc]
    _refuse(store, lost_ranks(missing, config.timeout_seconds) + left(config))


def _lost_key(rank: int) -> str:
    """The entry of a rank that has lost another one."""
    return f"galv/lost/{rank}"


def _num_refusals(store: dist.Store, *, more: int) -> int:
    """How many ranks have refused, after counting `more`; many when the rank that keeps the count is gone."""
    counted = _try(lambda: int(store.add("galv/refused", more)))
    return dist.get_world_size() + 1 if counted is None else counted


def _try(ask: Callable[[], Any]) -> Any:
    """What the store answers; None when the rank that keeps it is gone."""
    try:
        return ask()
    except (RuntimeError, dist.DistError):
        return None


def _leave() -> NoReturn:
    time.sleep(_GRACE_SECONDS)
    sys.stdout.flush()
    os._exit(2)  # a group whose other ranks are gone cannot be taken down in order


if __name__ == "__main__":
    main()
