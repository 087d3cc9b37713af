"""Starting the ranks of a plan on this machine by torchrun, or being one rank of torchrun's or Slurm's.

torchrun (`torch.distributed.run`) runs inside this process, so that its verdict on the ranks arrives as data and a
failed rank costs one line, not a report.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from galv.errors import RunError, UsageError

if TYPE_CHECKING:
    from galv.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank runs: a Python module or script with its arguments, under the plan file `plan`."""

    plan: Path
    program: str
    arguments: tuple[str, ...]
    is_module: bool

    @property
    def words(self) -> list[str]:
        """The command line after `python`."""
        return [*(["-m"] if self.is_module else []), self.program, *self.arguments]


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who started this process as one rank of many, and what the environment lacks for torch.distributed."""

    name: str
    rank: int
    world_size: int
    environment: Mapping[str, str]


# ----------------------------------------------------------------------------------------------- being a rank


def launched_by(environment: Mapping[str, str]) -> Launcher | None:
    """The launcher that `environment` speaks of, or None in a process started by hand.

    A Slurm batch script is not a rank, though Slurm tells it a process number: only `srun` sets a step. Raises RunError
    naming the variable that is missing or malformed.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _checked(Launcher("torchrun", *_place(environment, "RANK", "WORLD_SIZE"), {}), environment)
    in_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" not in environment or environment.get("SLURM_NTASKS", "1") == "1" or in_batch_script:
        return None
    rank, world_size = _place(environment, "SLURM_PROCID", "SLURM_NTASKS")
    return _checked(Launcher("Slurm", rank, world_size, _from_slurm(environment)), environment)


def _place(environment: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """The rank and the number of ranks by those variables. Raises RunError when they cannot be meant."""
    rank, world_size = _number(environment, rank_name), _number(environment, size_name)
    if rank >= world_size:
        raise RunError(
            f"{rank_name} is {rank} and {size_name} is {world_size} in the environment: ranks count from 0, so "
            f"{rank_name} must be less than {size_name}"
        )
    return rank, world_size


def _number(environment: Mapping[str, str], name: str, default: str = "0") -> int:
    """The whole number in the variable `name`. Raises RunError naming it when it holds anything else."""
    text = environment.get(name, default)
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise RunError(
            f"{name} is {text!r} in the environment, but it must be a whole number from 0; unset it to start the "
            "ranks by `galv run` itself, or start by torchrun or srun, which set it"
        )
    return int(text)


def _checked(launcher: Launcher, environment: Mapping[str, str]) -> Launcher:
    """`launcher`, when torch.distributed finds all that its `env://` start reads. Raises RunError naming what not."""
    complete = {**environment, **launcher.environment}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not complete.get(name)]
    if missing:
        _say_once(
            launcher.rank,
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: "
            "the ranks would not find each other; set it, start by torchrun, or unset RANK to start them here",
        )
    _number(complete, "LOCAL_RANK")
    if not 0 < _number(complete, "MASTER_PORT") < 2**16:
        _say_once(
            launcher.rank, f"MASTER_PORT is {complete['MASTER_PORT']} in the environment, but a port is 1 to 65535"
        )
    return launcher


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch.distributed's `env://` start, for one task of a Slurm step; what is set stays."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes),
        # A port of its own for every job, so that two jobs on one node do not meet.
        "MASTER_PORT": str(20000 + _number(environment, "SLURM_JOB_ID") % 10000),
    }
    return {name: value for name, value in found.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login` starts with `gpu07`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise RunError(f"cannot tell the first host of the Slurm node list {nodes!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def check_world_size(given: int, needed: int, *, source: str, rank: int = 0) -> None:
    """Nothing when `given` ranks are what the plan needs; otherwise raises RunError on rank 0 and exits elsewhere."""
    if given == needed:
        return
    _say_once(
        rank,
        f"the plan runs on {needed} ranks, but {source} gives {given}; "
        f"start {needed}, or plan again for a cluster of {given}",
    )


def _say_once(rank: int, message: str) -> NoReturn:
    """Raises RunError on rank 0. Every rank finds the same fault; the others leave after it, lest it be stopped."""
    if rank != 0:
        time.sleep(2)  # the launcher ends all ranks when one leaves
        sys.exit(2)
    raise RunError(message)


def become(task: Task, launcher: Launcher) -> None:
    """Replaces this process by the rank's own work."""
    sys.stdout.flush()
    environment = {**os.environ, **launcher.environment, "GALV_PLAN": str(task.plan)}
    os.execve(sys.executable, [sys.executable, *task.words], environment)


# ----------------------------------------------------------------------------------------------- starting ranks


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks there are, and where those of several nodes meet."""

    per_node: int
    num_nodes: int = 1
    endpoint: str | None = None
    """HOST:PORT of one node; None when all ranks are on this machine."""

    @classmethod
    def of(cls, plan: Plan, endpoint: str | None) -> Ranks:
        """The ranks of `plan`: on its nodes where they have an endpoint to meet at, else all on this machine.

        Raises UsageError for an endpoint that is none.
        """
        if endpoint is None:
            return cls(plan.num_devices)
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise UsageError(f"--rdzv-endpoint is HOST:PORT of one of the nodes, such as node0:29500, not {endpoint!r}")
        return cls(plan.cluster.devices_per_node, plan.cluster.num_nodes, endpoint)


def torchrun_words(task: Task, ranks: Ranks) -> list[str]:
    """The command line after `torchrun` that starts this machine's ranks."""
    if ranks.endpoint is None:
        place = ["--standalone"]
    else:
        name = f"galv-{task.plan.stem}"
        place = ["--nnodes", str(ranks.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", ranks.endpoint]
        place += ["--rdzv-id", name]
    # torchrun passes on the signals that it handles. Ctrl-C instead ends the ranks as it closes, by SIGTERM: as an
    # interrupt each rank would answer it with a traceback.
    signals = ["--signals-to-handle", "SIGTERM,SIGHUP,SIGQUIT"]
    module = ["--module"] if task.is_module else []
    return [*place, "--nproc-per-node", str(ranks.per_node), *signals, *module, task.program, *task.arguments]


def printed_command(task: Task, ranks: Ranks) -> str:
    """What `galv run` would start on each node, to paste into a shell."""
    return f"GALV_PLAN={shlex.quote(str(task.plan))} torchrun {shlex.join(torchrun_words(task, ranks))}"


def slurm_script(plan: Plan, words: Sequence[str]) -> str:
    """A job script for `sbatch` in which every task is one rank of `galv run WORDS`."""
    cluster = plan.cluster
    gpus = [f"#SBATCH --gpus-per-node={cluster.devices_per_node}"] if cluster.kind == "cuda" else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name=galv-{plan.model.name}",
            f"#SBATCH --nodes={cluster.num_nodes}",
            f"#SBATCH --ntasks-per-node={cluster.devices_per_node}",
            *gpus,
            "",
            # Slurm else lets the others wait for a rank that is gone.
            f"srun --kill-on-bad-exit=1 galv run {shlex.join(words)}",
            "",
        ]
    )


def start_ranks(task: Task, ranks: Ranks, *, on_gpus: bool) -> int:
    """The exit status of this machine's ranks: 0, or that of the rank that failed first."""
    os.environ["GALV_PLAN"] = str(task.plan)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks.per_node)))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    check_devices(ranks.per_node, on_gpus=on_gpus)
    logging.disable(logging.ERROR)
    try:
        run(parse_args(torchrun_words(task, ranks)))
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        rank = culprit(exit_codes, error.get_first_failure()[0], speaks=task.is_module)
        return _status(rank, exit_codes[rank], quiet=task.is_module)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    return 0


def check_devices(num_ranks: int, *, on_gpus: bool) -> None:
    """Nothing, when this machine has the devices of a plan. Raises UsageError saying where it could run."""
    import torch

    present = torch.cuda.device_count()
    if on_gpus and not present:
        raise UsageError(
            f"the plan is for {num_ranks} GPUs, and this machine has none; run it where they are, or plan for "
            f"--cluster cpu:{min(num_ranks, os.cpu_count() or 1)}x1 to train here"
        )
    if 0 < present < num_ranks:
        raise UsageError(
            f"the plan runs on {num_ranks} ranks, but this machine has {present} GPUs; start `galv run` on every node "
            f"with --rdzv-endpoint HOST:PORT of one of them, or on all at once by torchrun or srun"
        )


def culprit(exit_codes: Mapping[int, int], first: int, *, speaks: bool) -> int:
    """The rank to name, by the statuses of all that failed; `first` is the one that was seen first.

    A rank that has said what is wrong (status 2, where ranks speak) counts most, for the launcher then ends the others;
    then one that was stopped, for the others then fail as they lose it.
    """
    spoke = [rank for rank, code in exit_codes.items() if speaks and code == 2]
    stopped = [rank for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    likely = spoke or stopped
    return first if first in likely or not likely else min(likely)


def _status(rank: int, exit_code: int, *, quiet: bool) -> int:
    """The status to leave with after `rank` failed; says why, unless the rank has said it itself (status 2)."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", as the system does when memory runs out" if -exit_code == signal.SIGKILL else ""
        print(f"galv: rank {rank} was stopped by {name}{hint}", file=sys.stderr)
        return 128 - exit_code
    if not (quiet and exit_code == 2):
        print(f"galv: rank {rank} failed with exit status {exit_code}; its message stands above", file=sys.stderr)
    return exit_code
