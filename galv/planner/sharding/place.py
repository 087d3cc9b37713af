"""How one tensor of a unit lies on the tensor axis while layouts are searched for, and what changing that moves.

The spelling and the meaning are those of `plan.Layout`; here a placement is a light tuple, made by the thousand.
"""

from __future__ import annotations

from typing import NamedTuple

from galv.planner.plan import Layout, Redistribution


class Place(NamedTuple):
    """A `plan.Layout` as a tuple: `kind` is R, R+, P or S, and only S has `dim` and `chunks`."""

    kind: str
    dim: int = 0
    chunks: int = 1

    @property
    def is_sharded(self) -> bool:
        return self.kind == "S"

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" + (f"x{self.chunks}" if self.chunks > 1 else "")


WHOLE = Place("R")
"""The same on every rank, gradient complete."""
USED = Place("R+")
"""The same on every rank, gradient a summand."""
PARTIAL = Place("P")
"""A summand on every rank, gradient complete."""


def shard(dim: int, chunks: int = 1) -> Place:
    """The placement that cuts `dim`, chunk by chunk."""
    return Place("S", dim, chunks)


def place_of(layout: Layout) -> Place:
    """The placement that `layout` spells."""
    return Place(layout.kind, layout.dim or 0, layout.chunks)


def redistribution(source: Place, target: Place) -> Redistribution:
    """The change from `source` to `target` as a plan writes it."""
    return Redistribution.model_validate({"source": str(source), "target": str(target)})


def divides(shape: tuple[int, ...], place: Place, degree: int) -> bool:
    """Whether a tensor of `shape` can lie as `place` in equal parts."""
    return not place.is_sharded or shape[place.dim] % (degree * place.chunks) == 0


def local_shape(shape: tuple[int, ...], place: Place, degree: int) -> tuple[int, ...]:
    """The shape that one rank holds of a tensor of (global) `shape`."""
    if not place.is_sharded:
        return shape
    return tuple(size // degree if dim == place.dim else size for dim, size in enumerate(shape))


def global_shape(shape: tuple[int, ...], place: Place, degree: int) -> tuple[int, ...]:
    """The shape of the tensor of which one rank holds `shape`."""
    if not place.is_sharded:
        return shape
    return tuple(size * degree if dim == place.dim else size for dim, size in enumerate(shape))


_MOVED = {"gather": 1.0, "scatter": 1.0, "reduce": 2.0, "exchange": None, "": 0.0}
_FORWARD = {
    ("R", "R+"): "",
    ("R", "S"): "",
    ("R", "P"): "",
    ("S", "R+"): "gather",
    ("S", "R"): "gather",
    ("S", "S"): "exchange",
    ("P", "R"): "reduce",
    ("P", "S"): "scatter",
}
_BACKWARD = {
    ("R", "R+"): "reduce",
    ("R", "S"): "gather",
    ("R", "P"): "",
    ("S", "R+"): "scatter",
    ("S", "R"): "",
    ("S", "S"): "exchange",
    ("P", "R"): "",
    ("P", "S"): "gather",
}
"""Collectives of a change of layout: all-gather, reduce-scatter, all-reduce ("reduce"), all-to-all ("exchange")."""


def can_change(source: Place, target: Place) -> bool:
    """Whether the runtime has a redistribution from `source` to `target`, or needs none."""
    return source == target or (source.kind, target.kind) in _FORWARD


def moved_share(source: Place, target: Place, degree: int, *, backward: bool) -> float:
    """The bytes that each rank sends for a change of layout, as a share of the whole tensor's (ring algorithms)."""
    if source == target:
        return 0.0
    collective = (_BACKWARD if backward else _FORWARD)[source.kind, target.kind]
    ring = (degree - 1) / degree
    factor = _MOVED[collective]
    return ring / degree if factor is None else factor * ring
