"""The constants that are fitted, what is expected of them, and the shipped profiles with some of them changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile
from galv.profiles.stack import StackProfile

PROFILES = Path(__file__).parents[2] / "galv" / "profiles"

FAMILIES = {
    "a100": ("a100-sxm-80", "a100-sxm-40", "a800-sxm-80"),
    "h100": ("h100-sxm-80", "h800-sxm-80", "h200-sxm-141"),
}
"""Devices with one chip share its constants."""


@dataclass(frozen=True)
class Kind:
    """One kind of constant: what it can be, and how well it is known beforehand."""

    lowest: float
    highest: float
    start: float
    """Where nothing else is expected."""
    spread: float
    """Standard deviation of its logarithm around what is expected; nothing expected: a factor of e^3."""


UNKNOWN = 3.0

KINDS = {
    "matmul_efficiency": Kind(0.4, 0.95, 0.75, 0.2),
    "matmul_half_k": Kind(10, 400, 100, 0.7),
    "attention_forward_efficiency": Kind(0.1, 0.8, 0.4, 0.4),
    "attention_backward_efficiency": Kind(0.1, 0.8, 0.4, 0.4),
    "elementwise_factor": Kind(0.2, 4.0, 1.0, 0.4),
    "product_share": Kind(0.9, 1.1, 1.0, 0.05),
    "loss_bytes_per_logit": Kind(4.0, 120.0, 44.0, 0.5),
    "flash_share": Kind(0.3, 1.5, 1.0, 0.2),
    "score_passes": Kind(4.0, 40.0, 16.0, 0.3),
    "host_seconds_per_block": Kind(1e-4, 2e-2, 2e-3, 0.5),
    "host_seconds_per_collective": Kind(1e-6, 1e-3, 5e-5, 0.7),
    "stall_seconds": Kind(1e-3, 0.1, 0.01, UNKNOWN),
    "microbatch_seconds": Kind(1e-5, 0.05, 1e-3, 1.0),
    "wide_job_stall_seconds": Kind(0.01, 1.0, 0.3, UNKNOWN),
    "step_seconds": Kind(1e-3, 2.0, 0.02, UNKNOWN),
    "network_share": Kind(0.1, 1.1, 1.0, 0.3),
    "network_hop_seconds": Kind(1e-6, 2e-3, 1e-4, 1.0),
    "gather_overlap": Kind(0.05, 1.0, 0.5, UNKNOWN),
    "gradient_overlap": Kind(0.01, 1.0, 0.5, 0.5),
    "bucket_bytes": Kind(2e6, 4e9, 2.5e8, 1.0),
}
MEMORY_KINDS = {
    "saved_share": Kind(0.005, 3.0, 0.5, UNKNOWN),
    "logit_bytes": Kind(1.0, 24.0, 8.0, 0.7),
    "gradient_bytes": Kind(1.5, 8.0, 3.0, 0.5),
    "overhead_bytes": Kind(1e7, 6e9, 3e8, UNKNOWN),
    "score_bytes": Kind(0.5, 12.0, 5.0, 0.5),
}


@dataclass(frozen=True)
class Constant:
    """One fitted constant: of a device family or a stack."""

    owner: str
    name: str

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.name) or MEMORY_KINDS[self.name]

    @property
    def is_device(self) -> bool:
        return self.owner.startswith("device:")


def device_constants() -> list[Constant]:
    """What is fitted of a device: at most 6 each."""
    return [
        Constant(f"device:{family}", name)
        for family in FAMILIES
        for name in (
            "matmul_efficiency",
            "matmul_half_k",
            "attention_forward_efficiency",
            "attention_backward_efficiency",
        )
    ]


class Profiles:
    """The shipped profiles with some constants changed."""

    def __init__(self) -> None:
        self.stacks = {path.stem: json.loads(path.read_text()) for path in sorted((PROFILES / "stacks").glob("*.json"))}
        self.devices: dict[str, dict[str, float]] = {family: {} for family in FAMILIES}
        self._clusters: dict[ClusterProfile, ClusterProfile] = {}
        self._resolved: dict[str, StackProfile] = {}

    def get(self, constant: Constant) -> float:
        """The value as it stands."""
        kind, owner = constant.owner.split(":")
        if kind == "stack":
            return float(self._merged(owner)[constant.name])
        if constant.name in self.devices[owner]:
            return self.devices[owner][constant.name]
        device = json.loads((PROFILES / "library" / f"{FAMILIES[owner][0]}.json").read_text())["device"]
        value = device[constant.name]
        return float(value["bf16"] if isinstance(value, dict) else value)

    def set(self, constant: Constant, value: float) -> None:
        """Changes one constant."""
        kind, owner = constant.owner.split(":")
        if kind == "stack":
            self.stacks[owner][constant.name] = value
            self.stacks[owner].setdefault("sources", {}).setdefault(constant.name, "fitted")
            self._resolved.clear()
        else:
            self.devices[owner][constant.name] = value
            self._clusters.clear()

    def expected(self, constant: Constant) -> float | None:
        """What the stack's profile expects of a constant before any run; None where nothing is."""
        kind, owner = constant.owner.split(":")
        if kind == "device":
            return constant.kind.start
        found: float | None = self.stacks[owner].get("priors", {}).get(constant.name)
        return found

    def _merged(self, name: str) -> dict[str, Any]:
        own = dict(self.stacks[name])
        like = own.pop("like", None)
        if like is None:
            return own
        base = self._merged(like)
        fitted = tuple(dict.fromkeys([*base.get("fitted", ()), *own.get("fitted", ())]))
        joined = {part: {**base.get(part, {}), **own.get(part, {})} for part in ("priors", "sources")}
        return {**base, **own, **joined, "fitted": fitted}

    def stack(self, name: str) -> StackProfile:
        if name not in self._resolved:
            self._resolved[name] = StackProfile.model_validate(self._merged(name))
        return self._resolved[name]

    def parents(self, name: str) -> list[str]:
        """The stack and those that it is like."""
        like = self.stacks[name].get("like")
        return [name, *(self.parents(like) if like else [])]

    def cluster(self, cluster: ClusterProfile) -> ClusterProfile:
        """`cluster` with its device as it stands."""
        if cluster not in self._clusters:
            self._clusters[cluster] = cluster.model_copy(update={"device": self._device(cluster.device)})
        return self._clusters[cluster]

    def _device(self, device: DeviceProfile) -> DeviceProfile:
        values = next((self.devices[f] for f, names in FAMILIES.items() if device.name in names), {})
        if not values:
            return device
        figures: dict[str, Any] = dict(values)
        if "matmul_efficiency" in figures:
            rate = figures["matmul_efficiency"]
            figures["matmul_efficiency"] = {**device.matmul_efficiency, "bf16": rate, "fp16": rate}
        return DeviceProfile.model_validate({**device.model_dump(), **figures})


def stack_constants(kinds: Iterable[str], profiles: Profiles) -> list[Constant]:
    """The constants among `kinds` that the stacks themselves declare as fitted."""
    return [
        Constant(f"stack:{name}", field)
        for name, figures in profiles.stacks.items()
        for field in figures.get("fitted", ())
        if field in kinds
    ]


def write(profiles: Profiles, constants: Iterable[Constant]) -> None:
    """Puts `constants` into the shipped files, three digits each."""
    for constant in constants:
        kind, owner = constant.owner.split(":")
        value = float(f"{profiles.get(constant):.3g}")
        paths = [f"stacks/{owner}"] if kind == "stack" else [f"library/{device}" for device in FAMILIES[owner]]
        for path in (PROFILES / f"{name}.json" for name in paths):
            entry = json.loads(path.read_text())
            figures = entry if kind == "stack" else entry["device"]
            if isinstance(figures[constant.name], dict):
                figures[constant.name] |= {"bf16": value, "fp16": value}
            else:
                figures[constant.name] = value
            path.write_text(json.dumps(entry, indent=2) + "\n")
