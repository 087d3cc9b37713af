"""The options that several subcommands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from galv.errors import UsageError

# The words of galv.planner.plan, written again because importing that module doubles the time of `galv --help`.
Precision = Literal["bf16", "fp16", "fp32"]
Optimizer = Literal["adamw", "sgd"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json (file or folder), hf:NAME, or package.module:factory.",
        show_default=False,
    ),
]
ClusterSpec = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="DEVICE:DEVICES_PER_NODExNODES, such as h100-sxm-80:8x4 or cpu:4x1, or a YAML file.",
        show_default=False,
    ),
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", min=1, metavar="N", help="Samples per step, all devices.", show_default=False)
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, metavar="N", help="Tokens per sample; needed for language models."),
]
PrecisionName = Annotated[
    Precision | None,
    typer.Option(
        "--precision", help="Of the computation, weights stay fp32; default: bf16 on a GPU that has it, else fp32."
    ),
]
OptimizerName = Annotated[Optimizer, typer.Option("--optimizer")]
MemoryGib = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="GIB|PERCENT",
        help="What one device may hold, such as 72 or 90%; by default what its profile says.",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="package.module:function",
        help="Returns a factory model's example inputs, given a microbatch size.",
    ),
]
Units = Annotated[
    list[str] | None,
    typer.Option(
        "--units",
        metavar="PATTERN",
        help="Modules that are to be units, such as 'encoder.stages.*'; repeatable. Default: found by structure.",
    ),
]
Opaque = Annotated[
    list[str] | None,
    typer.Option(
        "--opaque",
        metavar="PATTERN",
        help="Modules that are not traced: each is one unit that every device holds whole; repeatable.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PLAN.JSON", help="Write the plan to this file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A plan file.", show_default=False)]


def memory(text: str | None) -> float | str | None:
    """What `--memory` says: a number of GiB, or a share as it was written. Raises UsageError for anything else."""
    if text is None or text.endswith("%"):
        return text
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"--memory takes a number of GiB such as 72, or a share such as 90%, not {text!r}") from error
