"""A model's traced forward around its units, for any number of samples, with the dim of every value that counts them.

A trace has sizes in it as constants. Of two traces, made with few and with many samples, what grows does so with the
number of samples. So constants for another number follow, and a value's dim of samples is the one that grows: nothing
is guessed from a size that happens to be the number of samples. One trace serves where one number of samples is all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from galv.errors import ModelError
from galv.planner.plan import Plan

FEW, MANY = 2, 4
"""Samples of the two traces. Not one: dims of length 1 make some operators disappear."""

Glue = fx.GraphModule | Callable[[int], fx.GraphModule]
"""A model's traced forward around its units, or what gives it for a number of samples. A graph, for one data-parallel
group's microbatch, serves plans whose units all have one data-parallel degree."""


class SizedGlue:
    """The forward in two sizes; nodes are those of the smaller one, `graph`."""

    def __init__(self, few: fx.GraphModule, many: fx.GraphModule, num_few: int, num_many: int) -> None:
        self.module, self._num_few, self._num_many = few, num_few, num_many
        self._twins = dict(zip(few.graph.nodes, many.graph.nodes, strict=False))
        alike = all(_kind(a) == _kind(b) for a, b in self._twins.items())
        if len(few.graph.nodes) != len(many.graph.nodes) or not alike:
            raise ModelError(
                "the model does other operators between its units for another number of samples, so its units cannot "
                "have different data-parallel degrees"
            )
        self._lengths = {self._samples_along(node, dim) for node in self._inputs() if (dim := self._grows(node))}
        self._order_kept: dict[fx.Node, bool] = {}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def arguments(self, node: fx.Node, num_samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of `node` for that many samples, with the nodes of `graph`."""
        twin = self._twins[node]
        args = self._sized(node, tuple(node.args), tuple(twin.args), num_samples)
        return args, self._sized(node, dict(node.kwargs), dict(twin.kwargs), num_samples)

    def value(self, node: fx.Node, num_samples: int) -> Tensor | None:
        """What `node` gives for that many samples, on the meta device; None when that is no single tensor."""
        few = node.meta["val"]
        if not isinstance(few, Tensor):
            return None
        shapes = zip(few.shape, self._twins[node].meta["val"].shape, strict=True)
        shape = [self._between(node, a, b, num_samples) for a, b in shapes]
        return torch.empty(shape, dtype=few.dtype, device="meta")

    def batch_dim(self, node: fx.Node) -> int | None:
        """The dim of the tensor `node` gives along which the samples lie, in their order; None when it has none.

        Raises ModelError when they do not lie along one dim, each in one piece.
        """
        dims = self._grows(node)
        if len(dims) > 1 or (dims and not self._in_order(node, dims)):
            raise ModelError(
                f"{node.name}, of shape {tuple(node.meta['val'].shape)} for {self._num_few} samples, goes between "
                "units of different data-parallel degrees, but its samples do not lie in a row along one dim"
            )
        return dims[0] if dims else None

    # -- sizes

    def _sized(self, node: fx.Node, few: Any, many: Any, num_samples: int) -> Any:
        if isinstance(few, (tuple, list)):
            items = [self._sized(node, a, b, num_samples) for a, b in zip(few, many, strict=True)]
            return items if isinstance(few, list) else tuple(items)
        if isinstance(few, dict):
            return {key: self._sized(node, few[key], many[key], num_samples) for key in few}
        if isinstance(few, slice):
            ends = ((few.start, many.start), (few.stop, many.stop), (few.step, many.step))
            return slice(*(self._sized(node, a, b, num_samples) for a, b in ends))
        if isinstance(few, (fx.Node, bool)) or few == many:
            return few
        return self._between(node, few, many, num_samples)

    def _between(self, node: fx.Node, few: Any, many: Any, num_samples: int) -> Any:
        """A number for `num_samples` given those for few and for many: a constant plus a share for each sample."""
        if few == many:
            return few
        if isinstance(few, int) and isinstance(many, int):
            growth, rest = divmod((many - few) * (num_samples - self._num_few), self._num_many - self._num_few)
            if not rest:
                return few + growth
        if isinstance(few, float) and math.isclose(few * self._num_few, many * self._num_many):
            return few * self._num_few / num_samples
        raise ModelError(
            f"{node.name} of the forward between the units has {few!r} for {self._num_few} samples and {many!r} for "
            f"{self._num_many}: no number can be told for {num_samples}, which the plan's units need"
        )

    # -- where the samples lie

    def _grows(self, node: fx.Node) -> list[int]:
        few, many = node.meta["val"], self._twins[node].meta["val"]
        if not isinstance(few, Tensor):
            return []
        return [dim for dim, (a, b) in enumerate(zip(few.shape, many.shape, strict=True)) if a != b]

    def _samples_along(self, node: fx.Node, dims: list[int]) -> float:
        """The length of one sample along the dim that grows; no whole number when the dim holds more than samples."""
        return float(node.meta["val"].shape[dims[0]]) / self._num_few

    def _inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def _in_order(self, node: fx.Node, dims: list[int]) -> bool:
        """Whether each sample is one piece along the dim, in order.

        So it is when the dim is as long as there are samples, or cut as an input's is; else what a view has merged
        begins with the samples, and what other operators make is like what they are given.
        """
        if node not in self._order_kept:
            length = self._samples_along(node, dims)
            self._order_kept[node] = length == 1 or (
                length in self._lengths if node.op != "call_function" else self._keeps_order(node, dims[0], length)
            )
        return self._order_kept[node]

    def _keeps_order(self, node: fx.Node, dim: int, length: float) -> bool:
        sources = [(source, dims) for source in node.all_input_nodes if (dims := self._grows(source))]
        if not sources or not all(len(dims) == 1 and self._in_order(source, dims) for source, dims in sources):
            return False
        if "view" in str(node.target):
            return all(_outer(source, dims[0]) == _outer(node, dim) for source, dims in sources)
        return all(self._samples_along(source, dims) == length for source, dims in sources)


def sized(glue: Glue, plan: Plan) -> SizedGlue:
    """The model's forward in as many sizes as the units of `plan` need. Raises ModelError for a graph of one size."""
    if len(plan.data_degrees) == 1:
        only = glue if isinstance(glue, fx.GraphModule) else glue(plan.micro_batch)
        return SizedGlue(only, only, plan.micro_batch, plan.micro_batch)
    if isinstance(glue, fx.GraphModule):
        raise ModelError(
            f"the units of the plan have data-parallel degrees {', '.join(map(str, plan.data_degrees))}, so its traced "
            "forward (glue) must be given as a function of the number of samples"
        )
    return SizedGlue(glue(FEW), glue(MANY), FEW, MANY)


def _kind(node: fx.Node) -> tuple[str, str]:
    return node.op, str(node.target)


def _outer(node: fx.Node, dim: int) -> int:
    """The number of elements along the dims outside of `dim`."""
    return math.prod(node.meta["val"].shape[:dim])
