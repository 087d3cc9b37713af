"""`galv graph`: show how galv takes a model apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from galv.cli import options
from galv.cli.files import check_writable, write_text

MicroBatch = Annotated[int, typer.Option("--micro-batch", min=1, metavar="N", help="Samples that are counted for.")]
Dot = Annotated[
    Path | None, typer.Option("--dot", metavar="FILE", help="Write units and edges to this file, for Graphviz.")
]


def graph(
    model: options.Model,
    seq_len: options.SeqLen = None,
    micro_batch: MicroBatch = 1,
    precision: options.Precision = "bf16",
    inputs: options.Inputs = None,
    units: options.Units = None,
    opaque: options.Opaque = None,
    dot: Dot = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a model's units, what they compute and keep, and what flows between them."""
    check_writable(dot, "the graph")
    from galv import api

    found = api.graph(
        model,
        inputs,
        seq_len=seq_len,
        micro_batch=micro_batch,
        precision=precision,
        units=units,
        opaque=opaque or (),
    )
    if dot is not None:
        write_text(found.to_dot(), dot)
    sys.stdout.write(found.to_json() if as_json else f"{found}\n")
