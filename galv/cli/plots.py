"""Sweeps and fronts drawn as PNG, with matplotlib where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from galv.errors import UsageError
from galv.planner.sweep import Sweep, SweepPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from galv.planner.front import Front

_PANELS: dict[str, Callable[[SweepPoint], float | None]] = {
    "tokens (samples) per second": lambda point: point.tokens_per_second,
    "step seconds": lambda point: point.step_seconds,
    "MFU, %": lambda point: None if point.mfu is None else 100 * point.mfu,
    "peak GiB per device": lambda point: None if point.peak_bytes is None else point.peak_bytes / 2**30,
}
_LOGARITHMIC = ("tokens (samples) per second", "step seconds")


def check_can_plot() -> None:
    """Nothing, where matplotlib is installed. Raises UsageError that says how to install it elsewhere."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'galv[reports]'")


def plot_sweep(sweep: Sweep, path: Path) -> None:
    """Writes `sweep` as a PNG to `path`, whole or not at all: four panels against the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for label, points in _lines(sweep):
            pairs = [(point.num_devices, value(point)) for point in points if value(point) is not None]
            axes.plot(*zip(*pairs, strict=True) if pairs else ([], []), marker="o", label=label)
        axes.set(title=title, xlabel="devices", xscale="log")
        if title in _LOGARITHMIC:
            axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(sweep.model)
    _write(figure, path)


def plot_front(front: Front, path: Path) -> None:
    """Writes `front` as a PNG to `path`, whole or not at all: step seconds against the memory of a device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes, points = figure.subplots(), front.points
    axes.step(
        [point.budget_bytes / 2**30 for point in points],
        [point.step_seconds for point in points],
        where="post",
        marker="o",
    )
    axes.set(title=front.plans[0].model.name, xlabel="GiB that a device may hold", ylabel="step seconds")
    axes.grid(visible=True, alpha=0.3)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    partial = path.with_name(f".galv-{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png", dpi=120)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write the plot to {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _lines(sweep: Sweep) -> Iterator[tuple[str, list[SweepPoint]]]:
    """Points that differ in the number of devices alone, with what they share."""
    lines: dict[str, list[SweepPoint]] = {}
    for point in sweep.points:
        device = point.cluster.partition(":")[0]
        sequence = f", sequence {point.seq_len:,}" if point.seq_len else ""
        lines.setdefault(f"{device}, batch {point.global_batch:,}{sequence}", []).append(point)
    for label, points in lines.items():
        yield label, sorted(points, key=lambda point: point.num_devices)
