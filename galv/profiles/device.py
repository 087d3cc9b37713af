"""What one device can do: peak rates, the share of them that real kernels reach, memory, and host costs.

A profile is data. It decides nothing about parallelism, and every figure in it names its source. Shipped profiles are
JSON files in `library/`; `galv profile` writes the same form for the machine that it runs on. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from importlib.abc import Traversable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from galv.errors import ClusterError, UnknownName, UsageError
from galv.profiles.readings import DeviceReadings

Kind = TypeVar("Kind", bound=BaseModel)

Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_SHORT_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def short_dtype(dtype: str) -> str:
    """The profile's name of a dtype: `torch.bfloat16`, `bfloat16` and `bf16` are all `bf16`."""
    bare = dtype.removeprefix("torch.")
    return _SHORT_DTYPES.get(bare, bare)


class Tile(BaseModel):
    """One output tile that the matrix-product library can use, and how near the best rate its kernel comes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    m: int = Field(ge=1)
    n: int = Field(ge=1)
    share: Share


class Figures(BaseModel):
    """The base of every profile part: frozen figures, each with a line in `sources`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: dict[str, str]
    """For each figure by its name: where it was read or how it was measured."""

    @model_validator(mode="after")
    def _sourced(self) -> Figures:
        figures = {name for name in type(self).model_fields if name not in ("name", "kind", "sources")}
        needed = {name for name in figures if type(self).model_fields[name].is_required()} | {
            name for name in self.model_fields_set & figures if getattr(self, name) is not None
        }
        if missing := sorted(name for name in needed if not self.sources.get(name, "").strip()):
            raise ValueError(f"no source given for {', '.join(missing)}")
        if unknown := sorted(set(self.sources) - figures):
            raise ValueError(f"sources for figures that do not exist: {', '.join(unknown)}")
        return self


Resource = Literal["compute", "link", "network", "host"]
"""What work occupies: multiprocessors, links inside the node, the network, or the path to the host's memory. Two
transfers to and from the host at once are two works of `host`, each on its own way."""

Slowdown = Annotated[float, Field(ge=1, le=2)]


class OverlapSlowdown(Figures):
    """How much slower two works each run while they run together: 1 not at all, 2 as if one after the other.

    A collective or a point-to-point transfer is work of `link` inside a node and of `network` across nodes.
    """

    compute_link: Slowdown
    compute_network: Slowdown
    compute_host: Slowdown
    link_network: Slowdown
    """Two collectives at once, one inside the node and one across nodes, on links and cards of their own."""
    link_host: Slowdown
    network_host: Slowdown
    host_host: Slowdown
    """A copy to the host and one from it."""

    def between(self, one: Resource, other: Resource) -> float:
        """The slowdown of a pair, in any order; 2 for two works that need the same resource, but for `host`."""
        if one == other:
            return self.host_host if one == "host" else 2.0
        first, second = sorted((one, other), key=_RESOURCES.index)
        found: float = getattr(self, f"{first}_{second}")
        return found

    def __hash__(self) -> int:
        return hash((self.compute_link, self.compute_network, self.compute_host))


_RESOURCES = ("compute", "link", "network", "host")


class DeviceProfile(Figures):
    """The abilities of one device, as the cost models need them. Bytes, seconds, FLOP/s; shares are of 1."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int = Field(gt=0)
    """All that a process can be given on the device, its context included."""
    peak_flops: dict[str, Rate]
    """Dense matrix-product FLOP/s by dtype: bf16, fp16, fp32, tf32. What a dtype without an entry lacks is a unit for
    it. torch multiplies fp32 matrices at the `fp32` rate unless told to use TF32."""
    matmul_efficiency: dict[str, Share]
    """The best share of `peak_flops` that a large matrix product reaches, by the same dtypes."""
    matmul_half_k: float = Field(ge=0)
    """Inner length at which a matrix product runs at half its best rate: the rate grows as k / (k + this)."""
    matmul_tiles: tuple[Tile, ...] = Field(min_length=1)
    """Output tiles to choose from."""
    num_multiprocessors: int = Field(ge=1)
    """Tiles computed at once; a last, part-filled wave of tiles takes as long as a full one."""
    attention_forward_efficiency: Share
    """Share of the peak that fused attention reaches forward, counting only scores that are not masked away."""
    attention_backward_efficiency: Share
    memory_bytes_per_second: float = Field(gt=0)
    memory_efficiency: Share
    """Share of the memory bandwidth that element-wise kernels reach."""
    launch_seconds: Seconds
    """Host time to issue one operator from eager PyTorch; a device never runs ahead of its host."""
    kernel_seconds: Seconds
    """Device time of the smallest kernel; every operator pays it on top of its work."""
    overlap: OverlapSlowdown
    """How much computation, transfers and copies slow each other down."""
    context_bytes: int = Field(ge=0)
    """Taken from `memory_bytes` before the first tensor: context, libraries, communication buffers."""
    allocator_slack: float = Field(ge=0, lt=1)
    """Bytes reserved but unusable, as a share of the bytes allocated at the peak."""
    measured: DeviceReadings | None = None
    """Operators as `galv profile` timed them; they win over the figures above."""

    @model_validator(mode="after")
    def _rates_agree(self) -> DeviceProfile:
        if "fp32" not in self.peak_flops:
            raise ValueError("peak_flops needs at least fp32")
        if set(self.peak_flops) != set(self.matmul_efficiency):
            raise ValueError("peak_flops and matmul_efficiency must cover the same dtypes")
        if self.context_bytes >= self.memory_bytes:
            raise ValueError("context_bytes leaves no memory")
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bytes_per_second, self.measured))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes with a matrix-product rate."""
        return tuple(self.peak_flops)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for `dtype`, in any spelling. Raises UsageError where the device has no unit for it."""
        rate = self.peak_flops.get(short_dtype(dtype))
        if rate is None:
            raise UsageError(f"{self.name} multiplies no {short_dtype(dtype)}; it has {', '.join(self.dtypes)}")
        return rate

    def best_flops(self, dtype: str) -> float:
        """FLOP/s of a large matrix product. A dtype without a rate (integers, fp64) counts as fp32."""
        known = dtype if dtype in self.peak_flops else short_dtype(dtype)
        known = known if known in self.peak_flops else "fp32"
        return self.peak_flops[known] * self.matmul_efficiency[known]

    @property
    def achieved_bytes_per_second(self) -> float:
        """Memory bandwidth that element-wise kernels reach."""
        return self.memory_bytes_per_second * self.memory_efficiency


# ----------------------------------------------------------------------------------------------- the library


def device_names() -> tuple[str, ...]:
    """The names of the shipped device profiles, sorted."""
    names = (file.name for file in _library().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


@lru_cache
def load_device(name: str) -> DeviceProfile:
    """The shipped profile called `name`. Raises UnknownName, listing the valid names."""
    return read_figures(DeviceProfile, library_entry(name)["device"], f"device {name}")


def _library() -> Traversable:
    return resources.files("galv.profiles").joinpath("library")


@lru_cache
def library_entry(name: str) -> Mapping[str, Any]:
    """The library file of device `name`: the parts `device`, and `intra_node` and `inter_node` of its usual node."""
    if name not in device_names():
        raise UnknownName("device", name, device_names())
    text = _library().joinpath(f"{name}.json").read_text(encoding="utf-8")
    entry: Mapping[str, Any] = json.loads(text)
    return entry


_NO_MAPPING = "Input should be keys with values"


def read_figures(kind: type[Kind], data: Mapping[str, Any], what: str) -> Kind:
    """`data` as a value of `kind`. Raises ClusterError naming `what` and the first figure that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = _NO_MAPPING if first["type"] in ("model_type", "dict_type") else first["msg"]
        message = message.removeprefix("Value error, ")
        raise ClusterError(f"{what}: {place + ': ' if place else ''}{message}") from error
