"""One rank of `galv run` without a script: trains the plan's model on synthetic data and reports beside the estimate.

Started by torchrun, or as one task of a Slurm step, as `python -m galv.cli.worker PLAN --steps N [--seed S]`. Rank 0
speaks. A refusal is one message from one rank and exit status 2 from all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from galv import api
from galv.cli.files import read_plan
from galv.errors import GalvError
from galv.planner.plan import Plan
from galv.planner.plan_table import count, gib, seconds
from galv.runtime.synthetic import synthetic_batches
from galv.runtime.trainer import LEARNING_RATE, StepRecord, train

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
        _run(read_plan(options.plan), options.steps, options.seed, rank)
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
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


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


def _run(plan: Plan, steps: int, seed: int, rank: int) -> None:
    module = api.parallelize(api.build_model(plan), plan, seed=seed)
    optimizer = module.optimizer(lr=LEARNING_RATE)
    records = train(module, synthetic_batches(plan, seed), steps=steps, optimizer=optimizer)
    if rank == 0:
        print(_header(plan), flush=True)
        seen = list(_shown(records, plan, steps))
    else:
        seen = list(records)
    peaks = _peaks(plan, seen[-1].peak_bytes, module.device)
    if rank == 0:
        print(_summary(plan, seen, peaks), flush=True)


# ----------------------------------------------------------------------------------------------- what rank 0 says


def _header(plan: Plan) -> str:
    training = plan.training
    return (
        f"{plan.model.name}, {count(plan.model.num_parameters)} parameters, on {plan.num_devices} x "
        f"{plan.cluster.device}: global batch {training.global_batch}, {training.precision}, {training.optimizer}, "
        "synthetic data\n\n"
        f"{'step':>6}  {'loss':>9}  {'grad norm':>9}  {'time':>9}  {_unit(plan) + '/s':>12}"
    )


def _unit(plan: Plan) -> str:
    return "samples" if plan.training.seq_len is None else "tokens"


def _shown(records: Iterable[StepRecord], plan: Plan, steps: int) -> Iterator[StepRecord]:
    """The records, each with its line on standard output, and a progress bar where a person looks on."""
    with _progress(steps) as advance:
        for record in records:
            print(_line(record, plan), flush=True)
            advance()
            yield record


def _line(record: StepRecord, plan: Plan) -> str:
    return (
        f"{record.step:>6}  {record.loss:>9.4f}  {record.gradient_norm:>9.3f}  {seconds(record.seconds):>9}  "
        f"{_per_second(plan, record.seconds):>12,.0f}"
    )


def _per_second(plan: Plan, step_seconds: float) -> float:
    return plan.training.global_batch * (plan.training.seq_len or 1) / step_seconds


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A function that says that one more step is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Lines go above the bar when both are on the terminal, and untouched to a file or pipe.
    display = Progress(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
    with display:
        task = display.add_task("training", total=steps)
        yield lambda: display.advance(task)


def _summary(plan: Plan, records: list[StepRecord], peaks: list[int]) -> str:
    """What was measured beside what the plan promised; the first step warms up and counts only when alone."""
    measured = statistics.median(record.seconds for record in records[1:] or records)
    estimate = plan.estimate
    rows = [
        ("", "measured", "estimated"),
        ("step", seconds(measured), seconds(estimate.step_seconds)),
        (f"{_unit(plan)}/s", f"{_per_second(plan, measured):,.0f}", f"{estimate.tokens_per_second:,.0f}"),
    ]
    for stage, (peak, expected) in enumerate(zip(peaks, estimate.peak_bytes, strict=True)):
        place = f", stage {stage}" if len(peaks) > 1 else ""
        rows.append((f"peak memory{place}", f"{gib(peak)} GiB", f"{gib(expected)} GiB"))
    return "\n" + "\n".join(f"{name:<22}{first:>12}{second:>12}" for name, first, second in rows)


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
