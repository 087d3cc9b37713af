"""What is measured: a designed grid of questions, each one number of seconds. No torch here.

Sizes are spread evenly in their logarithms. What would take longer than `Limits.seconds` or more than `Limits.bytes`
is left out, so the same grid suits a laptop and an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

from galv.profiles.readings import Collective, Phase, Traffic

Kind = Literal["reference", "launch", "matmul", "attention", "traffic", "collective", "overlap"]
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Question:
    """One thing to time. Fields that do not apply keep their defaults."""

    kind: Kind
    dtype: str = "fp32"
    shape: tuple[int, ...] = ()
    """Of a matrix product: batch, m, n, k. Of attention: batch, heads, length, head dim."""
    phase: Phase = "forward"
    traffic: Traffic = "elementwise"
    num_bytes: int = 0
    collective: Collective = "all_reduce"
    size: int = 1
    """Members of each group."""
    num_nodes: int = 1
    """Nodes of each group."""
    part: Literal["", "compute", "communication", "together"] = ""
    """Of `overlap`."""

    @property
    def key(self) -> str:
        """A name that no other question has."""
        parts = {
            "reference": (),
            "launch": (),
            "matmul": (self.dtype, *self.shape),
            "attention": (self.dtype, self.phase, *self.shape),
            "traffic": (self.traffic, self.num_bytes),
            "collective": (self.collective, self.size, self.num_nodes, self.num_bytes),
            "overlap": (self.part,),
        }[self.kind]
        return " ".join(map(str, (self.kind, *parts)))

    @property
    def flops(self) -> float:
        """Of a matrix product or of attention with all its scores."""
        if self.kind in ("matmul", "reference"):
            batch, m, n, k = self.shape
            return 2.0 * batch * m * n * k
        if self.kind == "attention":
            batch, heads, length, head_dim = self.shape
            return 4.0 * batch * heads * length**2 * head_dim * (3.5 if self.phase == "backward" else 1.0)
        return 0.0

    @property
    def held_bytes(self) -> float:
        """Memory that one process needs for it, roughly."""
        if self.kind in ("matmul", "reference"):
            batch, m, n, k = self.shape
            return 4.0 * batch * (m * k + k * n + 2 * m * n)
        if self.kind == "attention":
            batch, heads, length, head_dim = self.shape
            return 32.0 * batch * heads * length * head_dim
        return self.num_bytes * (3.0 if self.kind == "collective" else 1.5)


@dataclass(frozen=True)
class Limits:
    """What one question may cost."""

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Sizes:
    """The points of a grid along each of its sides."""

    dtypes: tuple[str, ...]
    sides: tuple[int, ...]
    """Of matrices."""
    batched: tuple[tuple[int, int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    traffic: tuple[int, ...]
    updates: tuple[int, ...]
    """Bytes that updates of the optimizer, clipping and copies move."""
    messages: tuple[int, ...]
    collectives: tuple[Collective, ...] = field(default=get_args(Collective))


def sizes_of(device_kind: Literal["cuda", "cpu"], *, quick: bool) -> Sizes:
    """The grid for a device; the quick one has about a third of the points."""
    on_gpu = device_kind == "cuda"
    step = 2 if quick else 1
    matrices = (256, 512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (64, 128, 256, 512, 1024, 2048, 4096)
    lengths = (512, 1024, 2048, 4096, 8192) if on_gpu else (64, 128, 256, 512, 1024, 2048)
    heads = ((1, 16), (4, 32)) if on_gpu else ((2, 4), (4, 16))
    head_dims = (64, 128) if not quick else (64,)
    batched = [(b, s, s, d) for b, s, d in product((16, 64), lengths[::step], head_dims)]
    attention = [(b, h, s, d) for (b, h), s, d in product(heads, lengths[::step], head_dims)]
    return Sizes(
        dtypes=("bf16", "fp32") if on_gpu or not quick else ("fp32",),
        sides=matrices[::step],
        batched=tuple(batched),
        attention=tuple(attention),
        traffic=tuple(4 * KIB * 4**i for i in range(0, 9 if not on_gpu else 10, step)),
        updates=tuple(256 * KIB * 4**i for i in range(0, 6, step)),
        messages=tuple(KIB * 4**i for i in range(0, 11, step)),
    )


def questions(
    sizes: Sizes, limits: Limits, *, device_kind: Literal["cuda", "cpu"], groups: tuple[tuple[int, int], ...]
) -> tuple[list[Question], int]:
    """(what is to be asked, how many points the limits leave out). `groups`: (members, nodes) of each group shape."""
    wanted = list(dict.fromkeys(_questions(sizes, device_kind, groups)))
    kept = [q for q in wanted if q.flops <= limits.flops and q.held_bytes <= limits.num_bytes]
    return kept, len(wanted) - len(kept)


def _questions(
    sizes: Sizes, device_kind: Literal["cuda", "cpu"], groups: tuple[tuple[int, int], ...]
) -> Iterator[Question]:
    yield Question("reference", sizes.dtypes[0], (1, 512, 512, 512))
    yield Question("launch")
    for (size, num_nodes), kind, num_bytes in product(groups, sizes.collectives, sizes.messages):
        if kind != "p2p" or size == 2:
            yield Question("collective", num_bytes=num_bytes, collective=kind, size=size, num_nodes=num_nodes)
    parts: tuple[Literal["compute", "communication", "together"], ...] = ("compute", "communication", "together")
    for part in parts if groups else ():
        yield Question("overlap", sizes.dtypes[0], num_bytes=4 * MIB, size=groups[0][0], part=part)
    for num_bytes in sizes.traffic:
        yield Question("traffic", num_bytes=num_bytes)
    copies: tuple[Traffic, ...] = ("to_host", "to_device") if device_kind == "cuda" else ()
    updates: tuple[Traffic, ...] = ("adamw", "sgd", "clip")
    for traffic, num_bytes in product((*updates, *copies), sizes.updates):
        yield Question("traffic", traffic=traffic, num_bytes=num_bytes)
    phases: tuple[Phase, ...] = get_args(Phase)
    for dtype, shape, phase in product(sizes.dtypes, sizes.attention, phases):
        yield Question("attention", dtype, shape, phase)
    for dtype, (m, n, k) in product(sizes.dtypes, product(sizes.sides, repeat=3)):
        yield Question("matmul", dtype, (1, m, n, k))
    for dtype, (batch, m, n, k) in product(sizes.dtypes, sizes.batched):
        yield Question("matmul", dtype, (batch, m, n, k))
        yield Question("matmul", dtype, (batch, m, k, n))
