"""`galv profile`: measure this machine, and the units of a model on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from galv.cli import options
from galv.cli.files import check_writable
from galv.errors import UsageError

Output = Annotated[Path, typer.Option("--output", "-o", metavar="PROFILE.JSON", help="Write the profile to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="A third of the grid and short samples: under two minutes.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="DEVICES", help="cpu, cuda, or some GPUs: cuda:0,2; default: the GPUs where there are any."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes", min=0.01, metavar="M", help="At most; what is left then is not measured. Default 10, 1.2 if quick."
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        max=4096,
        metavar="N",
        help="Processes to measure with; default: one a GPU, or 1. Not under torchrun.",
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Time this model's units and add them to the profile, which is measured first where it does not exist.",
    ),
]
MicroBatch = Annotated[
    list[int] | None,
    typer.Option(
        "--micro-batch", min=1, metavar="N", help="With --model: samples at once; repeatable. Default 1, 2, 4."
    ),
]


def profile(
    output: Output = Path("profile.json"),
    quick: Quick = False,
    devices: Devices = None,
    minutes: Minutes = None,
    nproc: NumProcesses = None,
    model: OwnModel = None,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionName = None,
    micro_batch: MicroBatch = None,
    inputs: options.Inputs = None,
    units: options.Units = None,
) -> None:
    """Measure this machine, and write a profile that is a CLUSTER for every other command.

    An interrupted measurement goes on where it stopped. Under torchrun each process is one rank of it.
    """
    check_writable(output, "the profile")
    from galv.cli import profile_ranks as ranks

    chosen = ranks.chosen_devices(devices, nproc, os.environ)
    if model is None or not output.is_file():
        wish = ranks.wish(output, quick=quick, minutes=minutes)
        is_first = ranks.measure_machine(wish, chosen, output)
        if not is_first:
            return
    if model is not None:
        if chosen.is_launched:
            raise UsageError("--model needs no launch: run galv profile --model without torchrun")
        ranks.add_units(
            output,
            chosen,
            model,
            inputs,
            seq_len=seq_len,
            precision=precision,
            micro_batches=micro_batch,
            units=units,
            minutes=minutes,
        )
    sys.stdout.write(ranks.described(output) + "\n")
