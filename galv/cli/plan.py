"""`galv plan`: find the best plan for a model on a cluster, the k best, or step time against memory."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from galv.cli import options
from galv.cli.files import check_writable, write_text
from galv.cli.output import deliver, deliver_ranked, numbered
from galv.cli.progress import progress
from galv.errors import UsageError

if TYPE_CHECKING:
    from galv.planner.front import Front

Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="DEMAND",
        help="What the plan must have: tp=8, pp<=4, zero=2,3, interleaved; with UNITS: in front for some units only, "
        "such as model.layers.0-9:recompute=full. Repeatable.",
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="DEMAND", help="What it must not have, in the same words. Repeatable."),
]
ObjectiveName = Annotated[
    Literal["throughput", "memory", "cost"],
    typer.Option(
        "--objective",
        help="The fastest step, the least memory, or the fewest device-hours a sample, maybe on fewer devices.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Search no longer: take the best plan so far, with its gap."),
]
Top = Annotated[
    int, typer.Option("--top", min=1, max=100, metavar="K", help="Show the K best plans of different layouts.")
]
Pareto = Annotated[
    bool, typer.Option("--pareto", help="Show step time against memory: the fastest plan under each of some budgets.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="With --pareto: draw it.")]


def plan(
    model: options.Model,
    cluster: options.ClusterSpec,
    global_batch: options.GlobalBatch,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionName = None,
    optimizer: options.OptimizerName = "adamw",
    memory: options.MemoryGib = None,
    require: Require = None,
    forbid: Forbid = None,
    objective: ObjectiveName = "throughput",
    time_limit: TimeLimit = None,
    top: Top = 1,
    pareto: Pareto = False,
    plot: Plot = None,
    inputs: options.Inputs = None,
    units: options.Units = None,
    opaque: options.Opaque = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest plan that fits, and print it."""
    _check(output, plot, top=top, pareto=pareto)
    request: dict[str, Any] = {
        "cluster": cluster,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
        "optimizer": optimizer,
        "memory": options.memory(memory),
        "require": require or (),
        "forbid": forbid or (),
        "objective": objective,
        "time_limit": time_limit,
        "units": units,
        "opaque": opaque or (),
    }
    from galv import api

    with progress() as reporter:
        if pareto:
            front = api.pareto(model, inputs, **request, reporter=reporter)
        elif top > 1:
            found = api.plans(model, inputs, top=top, **request, reporter=reporter)
        else:
            best = api.plan(model, inputs, **request, reporter=reporter)
    if pareto:
        _show_front(front, output, plot, as_json=as_json)
    elif top > 1:
        deliver_ranked(found, output=output, as_json=as_json)
    else:
        deliver(best, output=output, as_json=as_json)


def _check(output: Path | None, plot: Path | None, *, top: int, pareto: bool) -> None:
    """Nothing, where all that is asked can be done together. Raises UsageError."""
    if pareto and top > 1:
        raise UsageError("--pareto shows one plan for each budget; leave out --top")
    if plot is not None and not pareto:
        raise UsageError("--plot draws step time against memory: it needs --pareto")
    for number in range(1, top + 1):
        check_writable(numbered(output, number))
    check_writable(plot, "the plot")
    if plot is not None:
        from galv.cli.plots import check_can_plot

        check_can_plot()


def _show_front(front: Front, output: Path | None, plot: Path | None, *, as_json: bool) -> None:
    if output is not None:
        write_text(front.to_csv(), output, "the table")
    if plot is not None:
        from galv.cli.plots import plot_front

        plot_front(front, plot)
    points = {"points": [asdict(point) for point in front.points]}
    sys.stdout.write(json.dumps(points, indent=1) + "\n" if as_json else f"{front}\n")
