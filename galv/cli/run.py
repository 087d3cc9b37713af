"""`galv run`: train under a plan.

Started by hand it starts the ranks itself (torchrun); started by torchrun or Slurm it is one of the ranks. Either way
the work is galv's own trainer on synthetic tokens, or the user's SCRIPT, which finds the plan's path in `GALV_PLAN`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from galv.cli import options
from galv.cli.failure import left
from galv.cli.files import check_writable, read_plan
from galv.cli.launch import (
    Ranks,
    Task,
    become,
    check_world_size,
    launched_by,
    printed_command,
    slurm_script,
    start_ranks,
)
from galv.errors import UsageError

if TYPE_CHECKING:
    from galv.runtime.train_config import TrainConfig

DEFAULT_STEPS = 20


class RunCommand(TyperCommand):
    """Leaves everything after SCRIPT to SCRIPT, options included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        cut = self._position_of_script(args)
        return super().parse_args(ctx, [*args[:cut], "--", *args[cut:]] if cut < len(args) else args)

    def _position_of_script(self, args: list[str]) -> int:
        """Where the second word that is no option stands, or the end; at "--" the user has marked it."""
        takes_value = {name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts}
        num_words, position = 0, 0
        while position < len(args) and args[position] != "--":
            word = args[position]
            num_words += not word.startswith("-")
            if num_words == 2:
                return position
            position += 2 if word in takes_value else 1
        return len(args)


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT ARGS", help="Your own training script and its arguments.", show_default=False),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="TRAIN.YAML",
        help="Data, optimizer, checkpoints and the like, without SCRIPT; see configs/train.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help=f"Without SCRIPT; the configuration's, or {DEFAULT_STEPS}."),
]
NumProcesses = Annotated[
    int | None,
    typer.Option("--nproc", min=1, metavar="N", help="Ranks to start here; must be the plan's number of devices."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Of the weights and samples without SCRIPT."),
]


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Where the nodes of a plan for several meet; start the same command on each.",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record", metavar="RUN.JSON", help="Write what the steps took and held to this file, for galv calibrate."
    ),
]
PrintCommand = Annotated[bool, typer.Option("--print-command", help="Print what would be started, and start nothing.")]
SlurmScript = Annotated[bool, typer.Option("--slurm", help="Print a job script for sbatch, and start nothing.")]


def run(
    plan: options.PlanFile,
    script: Words = None,
    config: Config = None,
    steps: Steps = None,
    nproc: NumProcesses = None,
    seed: Seed = None,
    endpoint: Endpoint = None,
    record: Record = None,
    print_command: PrintCommand = False,
    slurm: SlurmScript = False,
) -> None:
    """Train under a plan.

    Starts the plan's ranks on this machine, or this node's with --rdzv-endpoint; inside torchrun or Slurm, is one of
    them.
    """
    found = read_plan(plan)
    check_writable(record, "the record")
    training = _read(config)
    own = _options(config, steps, seed, record)
    task = _task(plan.absolute(), script or [], own)
    ranks = Ranks.of(found, endpoint)
    if nproc is not None:
        check_world_size(nproc, ranks.per_node, source="--nproc")
    if slurm:
        sys.stdout.write(slurm_script(found, [str(plan), *(script or own)]))
        return
    if print_command:
        sys.stdout.write(printed_command(task, ranks) + "\n")
        return
    launcher = launched_by(os.environ)
    if launcher is None:
        raise typer.Exit(_told(start_ranks(task, ranks, on_gpus=found.cluster.kind == "cuda"), training))
    check_world_size(launcher.world_size, found.num_devices, source=launcher.name, rank=launcher.rank)
    become(task, launcher)


def _told(status: int, training: TrainConfig | None) -> int:
    """`status`, after saying what is left of a run whose rank was stopped: it cannot say so itself."""
    if status > 128 and (said := left(training)):
        print(f"galv: {said.strip()}", file=sys.stderr)
    return status


def _read(config: Path | None) -> TrainConfig | None:
    """The configuration of the built-in trainer. Raises UsageError for one that cannot be read."""
    if config is None:
        return None
    from galv.runtime.train_config import read_train_config

    return read_train_config(config)


def _options(config: Path | None, steps: int | None, seed: int | None, record: Path | None) -> list[str]:
    """What the built-in trainer is told, as words."""
    given = {"--config": config and config.absolute(), "--steps": steps, "--seed": seed}
    given |= {"--record": record and record.absolute()}
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _task(plan: Path, words: list[str], options: list[str]) -> Task:
    if not words:
        return Task(plan, "galv.cli.worker", (str(plan), *options), is_module=True)
    if options:
        raise UsageError(f"{options[0]} is for training without SCRIPT; put it after {words[0]} to pass it on")
    if not Path(words[0]).is_file():
        raise UsageError(f"there is no script {words[0]}")
    return Task(plan, words[0], tuple(words[1:]), is_module=False)
