"""`galv sweep`: what-if over clusters, sequence lengths and batches, with no hardware at all."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from galv.cli import options
from galv.cli.files import check_writable, write_text
from galv.cli.progress import progress
from galv.errors import UsageError

Clusters = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTERS",
        help="As for plan, with lists in braces: 'h100-sxm-80:8x{1,2,4,8}'; several with blanks between.",
        show_default=False,
    ),
]
GlobalBatches = Annotated[
    str, typer.Option("--global-batch", metavar="N,N...", help="Samples per step, all devices.", show_default=False)
]
SeqLens = Annotated[
    str | None, typer.Option("--seq-len", metavar="N,N...", help="Tokens per sample; needed for language models.")
]
Price = Annotated[
    float | None, typer.Option("--price", min=0.0, metavar="MONEY", help="Of one device for an hour, to show the cost.")
]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the points as CSV.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", help="Draw throughput, step time, MFU and memory against devices."),
]


def sweep(
    model: options.Model,
    cluster: Clusters,
    global_batch: GlobalBatches,
    seq_len: SeqLens = None,
    precision: options.PrecisionName = None,
    optimizer: options.OptimizerName = "adamw",
    inputs: options.Inputs = None,
    price: Price = None,
    csv: Csv = None,
    plot: Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the best plan on each of several clusters, and compare them."""
    check_writable(csv, "the table")
    check_writable(plot, "the plot")
    from galv import api
    from galv.cli.plots import check_can_plot, plot_sweep

    if plot is not None:
        check_can_plot()
    with progress() as reporter:
        found = api.sweep(
            model,
            inputs,
            clusters=cluster.split(),
            seq_lens=None if seq_len is None else _numbers("--seq-len", seq_len),
            global_batches=_numbers("--global-batch", global_batch),
            precision=precision,
            optimizer=optimizer,
            price_per_device_hour=price,
            reporter=reporter,
        )
    if csv is not None:
        write_text(found.to_csv(), csv, "the table")
    if plot is not None:
        plot_sweep(found, plot)
    sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n" if as_json else f"{found}\n")


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise UsageError(f"{option} takes whole numbers from 1 on with commas between, not {text!r}")
    return [int(part) for part in parts]
