"""The profile of collectives alone of published machines, predicted and measured."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from galv.cost_models.communication import Group, collective_seconds
from galv.profiles.cluster import ClusterProfile, load_cluster

Row = dict[str, str]

DEVICES = {
    "a100-sxm-40": "a100-sxm-40",
    "a10g-24": "a10g",
    "l4-24": "l4",
    "v100-sxm2-32": "v100-sxm-32",
    "v100-sxm2-16": "v100-sxm-16",
}


def read_profile(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def summary(errors: list[float]) -> str:
    values = abs(np.array(errors))
    bias = float(np.median(errors))
    return (
        f"{len(errors):6} rows  median {np.median(values):6.1%}  p90 {np.quantile(values, 0.9):6.1%}  bias {bias:+.1%}"
    )


# ----------------------------------------------------------------------------------------------- collectives


def collective_report(data: Path) -> Iterator[str]:
    """Lines: the error of every kind of collective on every device, inside a node and across nodes, and by size."""
    groups: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    left_out: dict[str, int] = {}
    for row in read_profile(data / "collectives.csv"):
        try:
            error = _collective_error(row)
        except LookupError as reason:
            left_out[str(reason)] = left_out.get(str(reason), 0) + 1
            continue
        across = "across nodes" if _num_nodes(row) > 1 else "in a node"
        groups.setdefault(f"{row['gpu']} {row['collective']} {across}", []).append(error)
        sizes.setdefault(f"10^{int(np.log10(float(row['bytes'])))} bytes", []).append(error)
    everything = [error for errors in groups.values() for error in errors]
    yield f"collectives: {summary(everything)}"
    yield from (f"  {name:45} {summary(errors)}" for name, errors in sorted(groups.items()))
    yield from (f"  {name:45} {summary(errors)}" for name, errors in sorted(sizes.items()))
    yield from (f"  left out: {reason}: {count}" for reason, count in left_out.items())


def _num_nodes(row: Row) -> int:
    return max(1, int(float(row["num_nodes"] or 1)))


def _collective_error(row: Row) -> float:
    if not row["bytes"] or not row["seconds"]:
        raise LookupError("no size or no time")
    name = DEVICES.get(row["gpu"])
    if name is None:
        raise LookupError(f"no device profile for {row['gpu'] or 'an unnamed GPU'}")
    kind = row["collective"]
    if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"):
        raise LookupError(f"no collective of galv's: {kind}")
    size, nodes = int(row["group_size"]), _num_nodes(row)
    cluster, num_bytes = _cluster(row, name, nodes), float(row["bytes"])
    predicted = collective_seconds(kind, num_bytes, _group(row, size, nodes), cluster)  # type: ignore[arg-type]
    if row["source"] in LIST_BASED and kind in ("all_gather", "reduce_scatter"):
        predicted += 2 * num_bytes / cluster.device.achieved_bytes_per_second
    return predicted / float(row["seconds"]) - 1


LIST_BASED = ("mist_aceso_collectives",)
"""Sources that gather into lists of tensors and scatter from them, as torch.distributed then does with copies."""

NETWORKS = {"a100-sxm-40": 12.5e9, "v100-sxm-16": 3.125e9, "v100-sxm-32": 3.125e9, "a10g": 3.125e9, "l4": 3.125e9}
"""Bytes per second of the one network card of a node: 100 Gb/s on the A100 machines, 25 Gb/s on the others
(p3.16xlarge, and g5 and g6 instances)."""


def _group(row: Row, size: int, nodes: int) -> Group:
    """The group; all groups like it work at once, but point-to-point transfers were measured alone."""
    if nodes == 1:
        return Group(size, size)
    per_node = max(1, size // nodes) if row["stride"] != "strided" else 1
    others = 1 if row["collective"] == "p2p" else int(float(row["gpus_per_node"] or 8)) // per_node
    return Group(size, per_node, nodes, max(1, others))


def _cluster(row: Row, name: str, nodes: int) -> ClusterProfile:
    per_node = int(float(row["gpus_per_node"] or 8))
    cluster = load_cluster(f"{name}:{per_node}x{max(nodes, 1)}")
    card = {"bytes_per_second": NETWORKS[name], "devices_per_link": per_node}
    return cluster.model_copy(update={"inter_node": cluster.inter_node.model_copy(update=card)})
