"""`galv devices`: the devices that galv knows, where their figures come from, and what is in this machine."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from galv.cli import options

Name = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="Every figure of this one with its source.", show_default=False)
]


def devices(name: Name = None, as_json: options.AsJson = False) -> None:
    """List the devices to plan for, or all figures of one with their sources, and what this machine has."""
    from galv.profiles.device import device_names, library_entry, load_device

    if name is not None:
        load_device(name)
        entry = library_entry(name)
        sys.stdout.write(json.dumps(entry, indent=1) + "\n" if as_json else "\n\n".join(_parts(entry)) + "\n")
        return
    here = _here()
    if as_json:
        sys.stdout.write(json.dumps({"devices": list(device_names()), "here": here}, indent=1) + "\n")
        return
    sys.stdout.write(f"{_library()}\n\nhere: {'; '.join(here)}\n")


def _library() -> str:
    from galv.planner.plan_table import table
    from galv.profiles.cluster import default_link
    from galv.profiles.device import device_names, load_device

    rows: list[tuple[str, ...]] = [("device", "GiB", "bf16 TFLOP/s", "memory GB/s", "node GB/s", "network GB/s")]
    for name in device_names():
        device = load_device(name)
        links = [default_link(name, which) for which in ("intra_node", "inter_node")]
        rate = device.peak_flops.get("bf16", device.peak_flops.get("fp16", device.peak_flops["fp32"]))
        figures = [rate / 1e12, device.memory_bytes_per_second / 1e9, *(link.bytes_per_second / 1e9 for link in links)]
        rows.append((name, f"{device.memory_bytes / 2**30:.0f}", *(f"{figure:,.3g}" for figure in figures)))
    return table(rows, right=range(1, 6))


def _parts(entry: Any) -> list[str]:
    """Each part of a library file as lines of figure, value and source."""
    from galv.planner.plan_table import table

    return [
        f"{part}\n"
        + table(
            [
                ("figure", "value", "source"),
                *(
                    (key, str(value), figures["sources"].get(key, ""))
                    for key, value in figures.items()
                    if key != "sources"
                ),
            ]
        )
        for part, figures in entry.items()
        if isinstance(figures, dict)
    ]


def _here() -> list[str]:
    """What torch finds in this machine, with the device of the library that is most like it."""
    import torch

    from galv.profiles.measure.fit import like
    from galv.profiles.measure.ranks import machine

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        nearest = like(properties.name, "cuda", properties.total_memory)
        found.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.1f} GiB (like {nearest})")
    host = machine(torch.device("cpu"), 1)
    return [*found, f"{host.name}, {host.memory_bytes / 2**30:.1f} GiB (like cpu)"]
