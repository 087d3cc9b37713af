"""How the dims of an operator's tensors correspond: the one fact from which all its shardings follow.

Every dim of every tensor is a product of *factors*, the slowest first, and a factor that stands in several tensors runs
through them in step. A linear layer is (b s k), (n k) -> (b s n); a view that makes heads out of a width is
(b s (h d)) -> (b s h d); a split into three is (b s (3 w)) -> (b s w). Cutting one factor wherever it stands cuts the
operator: its output is cut too if the factor stands there, and is a partial sum if the operator sums over it.

`shapes` and `operators` write this down for each aten operator; `rules` turns it into placements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

Dim = tuple[int, ...]
"""Factors, by number; empty for a dim of size 1 and for one that is broadcast."""
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Factors:
    """The correspondence for one operator. Tensors are its inputs, in the order of the arguments, and its output."""

    sizes: tuple[int, ...]
    """Of each factor."""
    inputs: tuple[Dims, ...]
    output: Dims
    fixed: frozenset[int] = frozenset()
    """Factors that must stay whole, because the operator mixes values along them."""
    summed: frozenset[int] = frozenset()
    """Factors over which the operator sums."""
    addends: frozenset[int] = frozenset()
    """Inputs that are added to the sum once: they are summands whenever the output is."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of inputs in which, taken together, the operator is linear: summands in, summand out."""
    is_product: bool = False
    """Whether it is a matrix product or attention, whose FLOPs go with the product of all factors."""
    is_view: bool = False
    """Whether it moves no bytes."""
    is_uniform: bool = False
    """Whether its output, made from nothing, has the same value everywhere, so that any part of it can be made."""


@dataclass
class Builder:
    """Hands out factors while one operator is read."""

    inputs: tuple[tuple[int, ...], ...]
    """Shapes."""
    output: tuple[int, ...]
    sizes: list[int] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    divides_rows: bool = False
    """Whether products may be cut along the rows of their left operand."""

    @classmethod
    def of(cls, node: fx.Node) -> Builder:
        """A builder for an aten call."""
        return cls(tuple(tuple(value_of(x).shape) for x in tensor_arguments(node)), tuple(value_of(node).shape))

    def new(self, size: int, *, fixed: bool = False) -> Dim:
        """A dim of one fresh factor; an empty one for size 1, where there is nothing to cut."""
        if size == 1:
            return ()
        self.sizes.append(size)
        if fixed:
            self.fixed.add(len(self.sizes) - 1)
        return (len(self.sizes) - 1,)

    def fresh(self, shape: Sequence[int], fixed: Iterable[int] = ()) -> Dims:
        """A fresh factor for every dim of `shape`; those at the positions `fixed` must stay whole."""
        whole = set(fixed)
        return tuple(self.new(size, fixed=i in whole) for i, size in enumerate(shape))

    def done(self, inputs: Sequence[Dims], output: Dims, **rest: Any) -> Factors:
        """What has been read."""
        return Factors(tuple(self.sizes), tuple(inputs), output, frozenset(self.fixed), **rest)

    def opaque(self) -> Factors:
        """No correspondence: every tensor stays whole."""
        return self.done([tuple(() for _ in shape) for shape in self.inputs], tuple(() for _ in self.output))


def broadcast(dims: Dims, shape: Sequence[int], output: Sequence[int]) -> Dims:
    """The dims of a tensor of `shape` that is broadcast to `output`, whose dims are `dims`."""
    offset = len(output) - len(shape)
    return tuple(dims[offset + i] if size == output[offset + i] else () for i, size in enumerate(shape))


def linear_in(*groups: Iterable[int]) -> tuple[frozenset[int], ...]:
    """The `linear` sets of an operator."""
    return tuple(frozenset(group) for group in groups)


# ----------------------------------------------------------------------------------------------- reading aten calls


def operator_name(node: fx.Node) -> str:
    """The name of an aten call without overload and without the underscore of in-place variants."""
    if node.target is operator.getitem:
        return "getitem"
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def value_of(node: fx.Node) -> Tensor:
    """The (first) tensor that a node stands for."""
    return next(x for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, in order, repeated ones repeatedly."""
    return [x for x in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(x, fx.Node)]


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def positions(dims: Any, rank: int) -> list[int]:
    """Non-negative dims out of an argument that is one dim, several, or None for all."""
    listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return [dim % rank for dim in listed] if rank else []
