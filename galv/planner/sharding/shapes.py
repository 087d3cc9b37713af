"""Factors of the operators that only rearrange: views, permutations, slices, splits, joins, expansions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from galv.planner.sharding.factors import (
    Builder,
    Dim,
    Dims,
    Factors,
    argument,
    broadcast,
    linear_in,
    operator_name,
    positions,
)

_FIRST = linear_in({0})


def view(build: Builder, node: fx.Node) -> Factors:
    """Same elements in row-major order under another shape: common divisors of both shapes, slowest first."""
    if getattr(node.target, "_overloadname", "") == "dtype":
        return build.opaque()
    before, after = _common(build, build.inputs[0], build.output)
    others = [tuple(() for _ in shape) for shape in build.inputs[1:]]
    return build.done([before, *others], after, linear=_FIRST, is_view=True)


def _common(build: Builder, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of both shapes over the factors that they share."""
    lists: tuple[list[Dim], list[Dim]] = ([() for _ in before], [() for _ in after])
    left = [[i, size] for i, size in enumerate(before) if size != 1]
    right = [[i, size] for i, size in enumerate(after) if size != 1]
    while left and right:
        (i, a), (j, b) = left[0], right[0]
        if a % b and b % a:
            break
        factor = build.new(min(a, b))
        lists[0][i] += factor
        lists[1][j] += factor
        for queue, size in ((left, a), (right, b)):
            queue[0][1] = size // min(a, b)
            if queue[0][1] == 1:
                queue.pop(0)
    for queue, dims in ((left, lists[0]), (right, lists[1])):
        for i, size in queue:
            dims[i] += build.new(size, fixed=True)
    return tuple(lists[0]), tuple(lists[1])


def permute(build: Builder, node: fx.Node) -> Factors:
    """Dims in another order."""
    dims = build.fresh(build.inputs[0])
    order = _order(node, len(dims))
    return build.done([dims], tuple(dims[i] for i in order), linear=_FIRST, is_view=True)


def _order(node: fx.Node, rank: int) -> list[int]:
    """For each dim of the output, the dim of the input that it is."""
    name = operator_name(node)
    if name == "permute":
        return positions(argument(node, 1, "dims"), rank)
    if name == "movedim":
        source, destination = argument(node, 1, "source"), argument(node, 2, "destination")
        return _moved(positions(source, rank), positions(destination, rank), rank)
    order = list(range(rank))
    if name in ("t", "numpy_T"):
        return order[::-1]
    swapped = (-2, -1) if name == "mT" else (argument(node, 1, "dim0"), argument(node, 2, "dim1"))
    first, second = positions(swapped, rank)
    order[first], order[second] = order[second], order[first]
    return order


def _moved(source: list[int], destination: list[int], rank: int) -> list[int]:
    rest = iter(i for i in range(rank) if i not in source)
    return [source[destination.index(i)] if i in destination else next(rest) for i in range(rank)]


def expand(build: Builder, node: fx.Node) -> Factors:
    """Dims of size 1 repeated without a copy."""
    dims = build.fresh(build.output)
    others = [tuple(() for _ in shape) for shape in build.inputs[1:]]
    return build.done([broadcast(dims, build.inputs[0], build.output), *others], dims, linear=_FIRST, is_view=True)


def repeat_interleave(build: Builder, node: fx.Node) -> Factors:
    """Every element of a dim several times in a row: (n) -> (n r)."""
    given = argument(node, 2, "dim")
    if len(build.inputs) != 1 or not isinstance(given, int):
        return build.opaque()
    dims = build.fresh(build.inputs[0])
    dim = given % len(dims)
    times = build.new(build.output[dim] // build.inputs[0][dim])
    return build.done([dims], _with(dims, dim, dims[dim] + times), linear=_FIRST)


def repeat(build: Builder, node: fx.Node) -> Factors:
    """A whole dim several times in a row: (n) -> (r n)."""
    dims = build.fresh(build.inputs[0])
    offset = len(build.output) - len(dims)
    output = [build.new(size) for size in build.output[:offset]]
    for i, dim in enumerate(dims):
        output.append(build.new(build.output[offset + i] // max(build.inputs[0][i], 1)) + dim)
    return build.done([dims], tuple(output), linear=_FIRST)


def slice_(build: Builder, node: fx.Node) -> Factors:
    """Part of a dim; when the dim is made of such parts, ((p n)) -> (n)."""
    dim = argument(node, 1, "dim", 0) % len(build.output)
    start, step = argument(node, 2, "start") or 0, argument(node, 4, "step", 1)
    whole, part = build.inputs[0][dim], build.output[dim]
    start += whole if start < 0 else 0
    if part == whole:
        dims = build.fresh(build.inputs[0])
        return build.done([dims], dims, linear=_FIRST, is_view=True)
    return _part(build, dim, aligned=step == 1 and part > 0 and whole % part == 0 and start % part == 0)


def split(build: Builder, node: fx.Node) -> Factors:
    """A dim in parts, in equal ones ((p n)) -> (n)."""
    parts = [x.shape for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]
    dim = argument(node, 2, "dim", 0) % len(build.output)
    return _part(build, dim, aligned=len({tuple(part) for part in parts}) == 1)


def _part(build: Builder, dim: int, *, aligned: bool) -> Factors:
    """One part of `dim`; `aligned` when the dim consists of such parts."""
    output = build.fresh(build.output, fixed=() if aligned else (dim,))
    whole, part = build.inputs[0][dim], build.output[dim]
    if aligned:
        before = build.new(whole // part, fixed=True) + output[dim]
    else:
        before = build.new(whole, fixed=True)
    return build.done([_with(output, dim, before)], output, linear=_FIRST, is_view=True)


def select(build: Builder, node: fx.Node) -> Factors:
    """One position of a dim (`unbind`: every position), which disappears."""
    dim = argument(node, 1, "dim", 0) % len(build.inputs[0])
    dims = build.fresh(build.inputs[0], fixed=(dim,))
    return build.done([dims], dims[:dim] + dims[dim + 1 :], linear=_FIRST, is_view=True)


def cat(build: Builder, node: fx.Node) -> Factors:
    """Tensors one after the other along a dim, equal ones (n) (n) -> ((2 n))."""
    dim = argument(node, 1, "dim", 0) % len(build.output)
    equal = len(set(build.inputs)) == 1
    dims = build.fresh(build.inputs[0], fixed=() if equal else (dim,))
    joined = build.new(len(build.inputs), fixed=True) + dims[dim] if equal else build.new(build.output[dim], fixed=True)
    everything = linear_in(range(len(build.inputs)))
    return build.done([dims] * len(build.inputs), _with(dims, dim, joined), linear=everything)


def stack(build: Builder, node: fx.Node) -> Factors:
    """Equal tensors along a new dim."""
    dim = argument(node, 1, "dim", 0) % len(build.output)
    dims = build.fresh(build.inputs[0])
    output = (*dims[:dim], build.new(len(build.inputs), fixed=True), *dims[dim:])
    return build.done([dims] * len(build.inputs), output, linear=linear_in(range(len(build.inputs))))


def getitem(build: Builder, node: fx.Node) -> Factors:
    """One tensor of a tuple, whose first tensor stands for all."""
    if len(build.inputs[0]) != len(build.output):
        return build.opaque()
    differing = [i for i, (a, b) in enumerate(zip(build.inputs[0], build.output, strict=True)) if a != b]
    dims = build.fresh(build.output, fixed=differing)
    return build.done([dims], dims, linear=_FIRST, is_view=True)


def _with(dims: Dims, position: int, dim: Dim) -> Dims:
    return (*dims[:position], dim, *dims[position + 1 :])
