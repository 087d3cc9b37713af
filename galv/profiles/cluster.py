"""What a cluster is: equal nodes of equal devices, the links inside a node and the network between nodes.

`load_cluster` reads the two spellings of CLUSTER: `h100-sxm-80:8x4` (device, devices per node, nodes) and the path of
a YAML file:

    device: h100-sxm-80          # a shipped profile, or an inline device (below)
    devices_per_node: 8
    num_nodes: 8
    links:                       # optional; whatever is not said stays as in the device's usual node
      intra_node:
        gigabytes_per_second: 450      # one direction, one device
        efficiency: 0.8                # share of that which a large all-reduce or p2p transfer reaches
        gather_efficiency: 0.6         # the same for all-gather, reduce-scatter and all-to-all
        latency_microseconds: 3        # each hop of a ring or tree
        base_microseconds: 10          # each collective, whatever its size
        devices_per_link: 1            # devices that share one such link
      inter_node:
        gigabytes_per_second: 50       # one network card; devices_per_link says how many devices use it

The path of a profile that `galv profile` wrote stands for the machine that it measured, `PROFILE.json:4x1` for four of
its devices.

An inline device needs a name and a few numbers; all other figures are taken from the shipped profile `like`:

    device:
      name: my-device
      like: rtx-4090                   # default a100-sxm-80
      memory_gib: 24
      tflops: {bf16: 71, fp32: 35.6}   # dense peaks
      memory_gigabytes_per_second: 936

Figures are finite: rates from 1e-6 to 1e9 of their unit, at most 2**20 devices in all.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from galv.errors import ClusterError
from galv.profiles.device import DeviceProfile, library_entry, load_device, read_figures
from galv.profiles.link import LinkProfile
from galv.profiles.measured import MeasuredProfile, read_measured, split_spec

MAX_DEVICES = 2**20
"""Of one cluster."""

_SPEC = re.compile(r"(?P<device>[^:]+):(?P<devices>[0-9]{1,999})x(?P<nodes>[0-9]{1,999})")
_FORM = "write DEVICE:DEVICES_PER_NODExNODES, such as h100-sxm-80:8x4, or the path of a .yaml file or a .json profile"


class ClusterProfile(BaseModel):
    """`num_nodes` equal nodes of `devices_per_node` equal devices. Rank r sits in node r // devices_per_node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: str
    """As the user wrote it."""
    device: DeviceProfile
    devices_per_node: int = Field(ge=1)
    num_nodes: int = Field(ge=1)
    intra_node: LinkProfile
    inter_node: LinkProfile
    notes: tuple[str, ...] = ()
    """What a plan for it says of where its figures come from."""

    def __hash__(self) -> int:
        return hash((self.spec, self.device, self.devices_per_node, self.num_nodes, self.intra_node, self.inter_node))

    @model_validator(mode="after")
    def _bounded(self) -> ClusterProfile:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(_too_large(self.devices_per_node, self.num_nodes))
        return self

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    @property
    def links_per_node(self) -> int:
        """Network cards of one node."""
        return -(-self.devices_per_node // self.inter_node.devices_per_link)


def load_cluster(spec: str) -> ClusterProfile:
    """The cluster that `spec` describes: `DEVICE:DEVICES_PER_NODExNODES`, or the path of a YAML file or of a profile.

    Raises UnknownName for a device that is not shipped and ClusterError for everything else that is wrong.
    """
    if Path(spec).suffix in (".yaml", ".yml"):
        return _read_file(spec)
    measured = split_spec(spec)
    if measured is not None:
        return _measured_cluster(spec, *measured)
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ClusterError(f"{spec!r} is no cluster; {_FORM}")
    device = load_device(match["device"])
    devices, nodes = int(match["devices"]), int(match["nodes"])
    if min(devices, nodes) < 1:
        raise ClusterError(f"{spec!r} has no device; a cluster needs at least 1 device per node and 1 node")
    if devices * nodes > MAX_DEVICES:
        raise ClusterError(f"{spec!r}: {_too_large(devices, nodes)}")
    return ClusterProfile(
        spec=spec,
        device=device,
        devices_per_node=devices,
        num_nodes=nodes,
        intra_node=default_link(match["device"], "intra_node"),
        inter_node=default_link(match["device"], "inter_node"),
    )


def _measured_cluster(spec: str, path: str, shape: tuple[int, int] | None) -> ClusterProfile:
    """The machine that `galv profile` measured, or `shape` (devices per node, nodes) of it."""
    profile = read_measured(path)
    devices, nodes = shape or profile.shape
    if not 1 <= devices * nodes <= MAX_DEVICES:
        raise ClusterError(f"{spec!r}: a cluster has 1 to {MAX_DEVICES} devices")
    return measured_cluster(profile, spec, devices, nodes)


def measured_cluster(profile: MeasuredProfile, spec: str, devices: int, nodes: int) -> ClusterProfile:
    """`nodes` of `devices` each of the machine behind `profile`."""
    found = profile.setting(devices, nodes)
    return ClusterProfile(
        spec=spec,
        device=found.device,
        devices_per_node=devices,
        num_nodes=nodes,
        intra_node=found.intra_node,
        inter_node=found.inter_node,
        notes=profile.notes(devices, nodes),
    )


def _too_large(devices_per_node: int, num_nodes: int) -> str:
    return (
        f"{devices_per_node} devices on each of {num_nodes} nodes are too many; a cluster can have at most "
        f"{MAX_DEVICES} devices"
    )


@lru_cache
def default_link(device: str, which: str) -> LinkProfile:
    """The link `which` ("intra_node" or "inter_node") of the node that the shipped `device` usually comes in."""
    return read_figures(LinkProfile, library_entry(device)[which], f"{which} of device {device}")


# ----------------------------------------------------------------------------------------------- YAML files


# Bounds far beyond any device, within which nothing that is computed from them overflows.
_GigabytesPerSecond = Annotated[float, Field(ge=1e-6, le=1e9)]
_Tflops = Annotated[float, Field(ge=1e-6, le=1e9)]
_Microseconds = Annotated[float, Field(ge=0, le=1e9)]
_Efficiency = Annotated[float, Field(ge=1e-6, le=1)]


class _LinkFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    gigabytes_per_second: _GigabytesPerSecond | None = None
    efficiency: _Efficiency | None = None
    gather_efficiency: _Efficiency | None = None
    latency_microseconds: _Microseconds | None = None
    base_microseconds: _Microseconds | None = None
    devices_per_link: int | None = Field(None, ge=1, le=MAX_DEVICES)

    def figures(self, usual: LinkProfile) -> dict[str, float | int]:
        """What the file says, under the names and in the units of LinkProfile.

        An efficiency given alone moves the other one with it.
        """
        scaled: dict[str, float | int | None] = {
            "bytes_per_second": None if self.gigabytes_per_second is None else self.gigabytes_per_second * 1e9,
            "efficiency": self.efficiency,
            "gather_efficiency": self.gather_efficiency,
            "latency_seconds": None if self.latency_microseconds is None else self.latency_microseconds * 1e-6,
            "base_seconds": None if self.base_microseconds is None else self.base_microseconds * 1e-6,
            "devices_per_link": self.devices_per_link,
        }
        if self.efficiency is not None and self.gather_efficiency is None:
            scaled["gather_efficiency"] = self.efficiency * min(1.0, usual.gather_efficiency / usual.efficiency)
        return {name: value for name, value in scaled.items() if value is not None}


class _LinksFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    intra_node: _LinkFile = _LinkFile()
    inter_node: _LinkFile = _LinkFile()


class _DeviceFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1)
    memory_gib: float = Field(gt=0, le=2**30)
    tflops: dict[Literal["bf16", "fp16", "tf32", "fp32", "fp8"], _Tflops]
    memory_gigabytes_per_second: _GigabytesPerSecond
    like: str = "a100-sxm-80"


class _ClusterFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    device: str
    devices_per_node: int = Field(ge=1, le=MAX_DEVICES)
    num_nodes: int = Field(ge=1, le=MAX_DEVICES)
    links: _LinksFile = _LinksFile()


def _read_file(path: str) -> ClusterProfile:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # PyYAML lets the constructors of values speak
        raise ClusterError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: a cluster file has the keys device, devices_per_node, num_nodes and links")
    inline = None
    if isinstance(data.get("device"), dict):
        inline = read_figures(_DeviceFile, data["device"], f"{path}: device")
        data = {**data, "device": inline.name}
    file = read_figures(_ClusterFile, data, path)
    if file.devices_per_node * file.num_nodes > MAX_DEVICES:
        raise ClusterError(f"{path}: {_too_large(file.devices_per_node, file.num_nodes)}")
    device = load_device(file.device) if inline is None else _inline_device(path, inline)
    usual = file.device if inline is None else inline.like
    return ClusterProfile(
        spec=path,
        device=device,
        devices_per_node=file.devices_per_node,
        num_nodes=file.num_nodes,
        intra_node=_link(path, "intra_node", usual, file.links.intra_node),
        inter_node=_link(path, "inter_node", usual, file.links.inter_node),
    )


def _inline_device(path: str, given: _DeviceFile) -> DeviceProfile:
    """The profile `given.like` with the figures that the file names put in their place."""
    base = load_device(given.like)
    if "fp32" not in given.tflops:
        raise ClusterError(f"{path}: device.tflops needs at least fp32; it has {', '.join(given.tflops) or 'nothing'}")
    if given.memory_gib * 2**30 < base.context_bytes + 1:
        raise ClusterError(
            f"{path}: device.memory_gib: {given.memory_gib:g} leaves nothing: {given.like} needs "
            f"{base.context_bytes / 2**30:.2f} GiB before the first tensor"
        )
    peaks = {dtype: rate * 1e12 for dtype, rate in given.tflops.items()}
    usual = base.matmul_efficiency
    figures = {
        "name": given.name,
        "memory_bytes": int(given.memory_gib * 2**30),
        "peak_flops": peaks,
        "matmul_efficiency": {dtype: usual.get(dtype, min(usual.values())) for dtype in peaks},
        "memory_bytes_per_second": given.memory_gigabytes_per_second * 1e9,
    }
    sources = dict.fromkeys(base.sources, f"as {given.like}")
    sources |= dict.fromkeys(("memory_bytes", "peak_flops", "memory_bytes_per_second"), f"given in {path}")
    return read_figures(DeviceProfile, {**base.model_dump(), **figures, "sources": sources}, f"{path}: device")


def _link(path: str, which: str, device: str, override: _LinkFile) -> LinkProfile:
    """The usual link of `device`, with the figures that a cluster file overrides."""
    base = default_link(device, which)
    figures = override.figures(base)
    sources = base.sources | dict.fromkeys(figures, f"given in {path}")
    return read_figures(
        LinkProfile, {**base.model_dump(exclude_unset=True), **figures, "sources": sources}, f"{path}: links.{which}"
    )
