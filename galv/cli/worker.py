"""One rank of `galv run` without a script: trains the plan's model and reports beside the estimate.

Started by torchrun, or as one task of a Slurm step, as `python -m galv.cli.worker PLAN [--config FILE] [--steps N]
[--seed S]`. Rank 0 speaks. A refusal is one message from one rank and exit status 2 from all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from galv import api
from galv.cli.files import read_plan, write_text
from galv.cli.record import recorded
from galv.cli.told import Told
from galv.errors import GalvError
from galv.planner.plan import Plan
from galv.runtime.session import Session
from galv.runtime.step_profile import StepProfile
from galv.runtime.train_config import TrainConfig, read_train_config
from galv.runtime.weights import open_weights

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""
_GRACE_SECONDS = 2.0
"""How long a rank stays after another has begun to say what went wrong: the launcher ends all when one leaves."""


def main() -> None:
    """Runs this rank and leaves the process with its status."""
    options = _options()
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    try:
        _join(store, rank, world_size)
        _run(read_plan(options.plan), _config(options), rank, options.record)
        dist.destroy_process_group()
    except GalvError as error:
        _refuse(store, str(error))
    except torch.OutOfMemoryError as error:
        _refuse(store, f"out of memory: {error}\nPlan again with a smaller --memory than {options.plan} was made for")
    except KeyboardInterrupt:
        os._exit(130)  # whoever interrupts torchrun interrupts every rank
    except Exception:
        time.sleep(0.2)  # a rank that leaves says so before it closes its connections
        if _num_refusals(store, more=0) > 0:
            _leave()
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


def _join(store: dist.Store, rank: int, world_size: int) -> None:
    """Makes the default process group: NCCL where there are GPUs, gloo elsewhere, with a fair share of the cores."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        num_neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_neighbours))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


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


def _refuse(store: dist.Store, message: str) -> None:
    """Leaves with status 2; the first rank that comes here says why."""
    if _num_refusals(store, more=1) == 1:
        print(f"galv: {message}", file=sys.stderr, flush=True)
    _leave()


def _num_refusals(store: dist.Store, *, more: int) -> int:
    """How many ranks have refused, after counting `more`; many when the rank that keeps the count is gone."""
    try:
        return int(store.add("galv/refused", more))
    except (RuntimeError, dist.DistError):
        return dist.get_world_size() + 1


def _leave() -> None:
    time.sleep(_GRACE_SECONDS)
    sys.stdout.flush()
    os._exit(2)  # a group whose other ranks are gone cannot be taken down in order


if __name__ == "__main__":
    main()
