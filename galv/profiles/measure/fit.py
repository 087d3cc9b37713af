"""Samples -> the profile of a machine. No torch here.

Rates are the best that were read; everything between goes into readings, which the cost models interpolate. Figures
that cannot be timed (allocator slack, tiles) stay those of the shipped device that is most like it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from galv.profiles.device import DeviceProfile, OverlapSlowdown, device_names, library_entry, load_device, read_figures
from galv.profiles.link import LinkProfile
from galv.profiles.measure.grid import Question
from galv.profiles.measure.sampling import spread
from galv.profiles.measured import UNSTEADY, Measurement
from galv.profiles.readings import (
    AttentionReading,
    CollectiveReading,
    DeviceReadings,
    MatmulReading,
    Reading,
    TrafficReading,
)

Kind = TypeVar("Kind", bound=Reading)
Taken = Sequence[tuple[Question, Sequence[float]]]
"""Questions with their samples."""
SOURCE = "measured by galv profile"


def unsteadiness(taken: Taken) -> float:
    """How much the fixed piece of work varied."""
    return max((spread(samples) for question, samples in taken if question.kind == "reference"), default=0.0)


def like(name: str, kind: Literal["cuda", "cpu"], memory_bytes: int) -> str:
    """The shipped device that `name`, as torch tells it, is most like: same model, then nearest memory."""
    if kind == "cpu":
        return "cpu"
    words = set(re.findall(r"[a-z]*\d+[a-z]*", name.lower()))

    def fitness(entry: str) -> tuple[bool, bool, float]:
        own = entry.split("-")
        model = own[1] if own[0] in ("rtx", "titan") else own[0]
        bus = "pcie" in own and "pcie" not in name.lower()
        return model not in words, bus, abs(load_device(entry).memory_bytes - memory_bytes)

    best = min((entry for entry in device_names() if entry != "cpu"), key=fitness)
    return "a100-sxm-80" if fitness(best)[0] else best


def measurement(
    taken: Taken,
    *,
    name: str,
    base: str,
    processes: int,
    num_nodes: int,
    memory_bytes: int,
    context_bytes: int,
) -> Measurement:
    """The setting that `taken` describes, with what it lacks from the shipped device `base`."""
    known = [(question, samples) for question, samples in taken if samples]
    floor = unsteadiness(known)
    floor = floor if floor > UNSTEADY else 0.0
    usual = load_device(base)
    figures = _figures(known, usual) | {
        "name": name,
        "memory_bytes": memory_bytes,
        "context_bytes": min(context_bytes, memory_bytes - 1),
        "measured": _device_readings(known, floor),
    }
    sources = dict.fromkeys(usual.sources, f"as {base}") | {x: SOURCE for x in figures if x != "name"}
    kept = usual.model_dump(exclude_unset=True)
    device = read_figures(DeviceProfile, {**kept, **figures, "sources": sources}, name)
    links = [(_link(known, base, which, floor)) for which in ("intra_node", "inter_node")]
    return Measurement(
        processes=processes, num_nodes=num_nodes, device=device, intra_node=links[0], inter_node=links[1]
    )


def _figures(taken: Taken, usual: DeviceProfile) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    best: dict[str, float] = {}
    for question, samples in taken:
        if question.kind in ("matmul", "reference"):
            best[question.dtype] = max(best.get(question.dtype, 0.0), question.flops / statistics.median(samples))
    peaks = {dtype: max(rate, usual.peak_flops.get(dtype, 0.0)) for dtype, rate in best.items()}
    if usual.kind == "cpu":
        peaks = best
    figures["peak_flops"] = {**usual.peak_flops, **peaks}
    figures["matmul_efficiency"] = {**usual.matmul_efficiency, **{x: best[x] / peaks[x] for x in best}}
    moved = [q.num_bytes / statistics.median(s) for q, s in taken if q.kind == "traffic" and q.traffic == "elementwise"]
    if moved:
        rate = max(moved) if usual.kind == "cpu" else max(*moved, usual.memory_bytes_per_second)
        figures |= {"memory_bytes_per_second": rate, "memory_efficiency": max(moved) / rate}
    launches = [statistics.median(samples) for question, samples in taken if question.kind == "launch"]
    if launches:
        figures["launch_seconds"] = launches[0]
        figures |= {"kernel_seconds": launches[0]} if usual.kind == "cpu" else {}
    slowdown = _slowdown(taken)
    return figures if slowdown is None else figures | {"overlap": _overlap(usual.overlap, slowdown)}


def _overlap(usual: OverlapSlowdown, slowdown: float) -> dict[str, Any]:
    """The usual slowdowns with the measured one of computation beside collectives, in a node and across."""
    measured = dict.fromkeys(("compute_link", "compute_network"), slowdown)
    sources = usual.sources | dict.fromkeys(measured, SOURCE)
    return {**usual.model_dump(exclude_unset=True), **measured, "sources": sources}


def _slowdown(taken: Taken) -> float | None:
    """How much slower computation and a collective each run while they run together; None where not measured."""
    parts = {question.part: statistics.median(samples) for question, samples in taken if question.kind == "overlap"}
    if len(parts) < 3:
        return None
    shorter, longer = sorted((parts["compute"], parts["communication"]))
    return min(2.0, max(1.0, 1.0 + (parts["together"] - longer) / shorter))


def _device_readings(taken: Taken, floor: float) -> dict[str, Any]:
    readings = DeviceReadings(
        matmul=tuple(
            _readings(
                taken, ("matmul", "reference"), floor, lambda q, x: MatmulReading(dtype=q.dtype, shape=_four(q), **x)
            )
        ),
        attention=tuple(
            _readings(
                taken,
                ("attention",),
                floor,
                lambda q, x: AttentionReading(dtype=q.dtype, phase=q.phase, shape=_causal(q), **x),
            )
        ),
        traffic=tuple(
            _readings(
                taken, ("traffic",), floor, lambda q, x: TrafficReading(kind=q.traffic, num_bytes=q.num_bytes, **x)
            )
        ),
    )
    return readings.model_dump(exclude_unset=True)


def _readings(
    taken: Taken, kinds: tuple[str, ...], floor: float, make: Callable[[Question, dict[str, float]], Kind]
) -> Iterable[Kind]:
    for question, samples in taken:
        if question.kind in kinds:
            seconds = max(statistics.median(samples), 1e-12)
            yield make(question, {"seconds": seconds, "spread": max(spread(samples), floor)})


def _four(question: Question) -> tuple[float, float, float, float]:
    batch, m, n, k = question.shape
    return batch, m, n, k


def _causal(question: Question) -> tuple[float, float, float, float, float, bool]:
    batch, heads, length, head_dim = question.shape
    return batch, heads, length, length, head_dim, True


def _link(taken: Taken, base: str, which: Literal["intra_node", "inter_node"], floor: float) -> LinkProfile:
    """The usual link of `base` with what was timed on it; without that, the usual link."""
    own = [(q, s) for q, s in taken if q.kind == "collective" and (q.num_nodes > 1) == (which == "inter_node")]
    usual = read_figures(LinkProfile, library_entry(base)[which], which)
    readings = tuple(
        _readings(
            own,
            ("collective",),
            floor,
            lambda q, x: CollectiveReading(
                kind=q.collective, num_bytes=q.num_bytes, size=q.size, num_nodes=q.num_nodes, **x
            ),
        )
    )
    if not readings:
        return usual
    sources = dict.fromkeys(usual.sources, f"as {base}") | {"measured": SOURCE}
    data = {**usual.model_dump(exclude_unset=True), "sources": sources}
    return read_figures(LinkProfile, data | {"measured": {"collectives": [r.model_dump() for r in readings]}}, which)
