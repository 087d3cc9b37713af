"""Splits a backward in two: what the stage before waits for, and the weight gradients of matrix products, put off.

Within `WeightGradients`, products of an activation with a weight run as autograd functions whose backward makes the
activation's gradient and keeps the two factors of the weight's; `Products.make` multiplies them later and hands the
result to autograd, so that it arrives as any gradient does (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
2401.10241). All else is freed by the first part. Gradients of biases, norms, embeddings and convolutions come with it.

Products put off are `torch.nn.functional.linear`, `torch.addmm` with a vector, and matrix products by a matrix, of
weights that parameters alone determine: parameters, or views and shards of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


class _Product(NamedTuple):
    """x @ weight (+ bias), the weight being transposed or not."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool
    """Whether the weight lies as (columns of the result, columns of x)."""


@dataclass(frozen=True, eq=False)
class _Later:
    """The gradient of a weight, still to be multiplied out."""

    edge: GradientEdge
    """Where in the graph it belongs."""
    x: Tensor
    gradient: Tensor
    """Of the product's result."""
    transposed: bool

    def value(self) -> Tensor:
        x, gradient = self.x.flatten(0, -2), self.gradient.flatten(0, -2)
        return gradient.t() @ x if self.transposed else x.t() @ gradient


class Products:
    """What a backward has put off."""

    def __init__(self) -> None:
        self._waiting: list[_Later] = []

    def add(self, later: _Later) -> None:
        """One more."""
        self._waiting.append(later)

    def make(self) -> None:
        """Makes the gradients and accumulates them, one after the other; each one's factors are let go of."""
        together: defaultdict[tuple[Node, int], list[_Later]] = defaultdict(list)
        for later in self._waiting:
            together[later.edge.node, later.edge.output_nr].append(later)
        self._waiting.clear()
        for uses in together.values():
            edge, total = uses[-1].edge, uses.pop().value()
            while uses:
                total += uses.pop().value()
            torch.autograd.backward((edge,), (total,))


class WeightGradients(TorchFunctionMode):
    """While active, weight gradients of products are put off."""

    def __init__(self) -> None:
        super().__init__()
        self._products = Products()

    def surround(self, module: nn.Module) -> None:
        """Makes it active in every forward of `module`."""

        def enter(module: nn.Module, args: Any) -> None:
            self.__enter__()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def take(self) -> Products:
        """What backwards have put off since it was taken last."""
        products, self._products = self._products, Products()
        return products

    def put_off(self, later: _Later) -> None:
        """Adds to what will be taken."""
        self._products.add(later)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Calls by keyword are rare, and run as they are.
        reader = None if kwargs or not torch.is_grad_enabled() else _READERS.get(func)
        product = None if reader is None else reader(*args)
        if product is None or isinstance(product.weight, DTensor) or not _is_weight(product.weight):
            return func(*args, **(kwargs or {}))
        edge = get_gradient_edge(product.weight)
        return _PutOff.apply(product.x, product.weight, product.bias, product.transposed, edge, self)


class _PutOff(torch.autograd.Function):
    """A product whose backward leaves out the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        edge: GradientEdge,
        owner: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.edge, ctx.owner = transposed, edge, owner
        if transposed:
            return nn.functional.linear(x, weight, bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.owner.put_off(_Later(ctx.edge, x, gradient, ctx.transposed))
        wants_x, _, wants_bias, *_ = ctx.needs_input_grad
        before = gradient @ (weight if ctx.transposed else weight.t()) if wants_x else None
        bias = gradient.flatten(0, -2).sum(0) if wants_bias else None
        return before, None, bias, None, None, None


# ----------------------------------------------------------------------------------------------- products


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Product | None:
    return _Product(x, weight, bias, True) if weight.ndim == 2 and x.ndim >= 2 else None


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> _Product | None:
    return _Product(x, weight, bias, False) if bias.shape == weight.shape[1:] else None


def _matmul(x: Any, weight: Any) -> _Product | None:
    are_tensors = isinstance(x, Tensor) and isinstance(weight, Tensor)
    return _Product(x, weight, None, False) if are_tensors and weight.ndim == 2 and x.ndim >= 2 else None


_READERS: dict[Any, Callable[..., _Product | None]] = {
    nn.functional.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}


def _is_weight(tensor: Tensor) -> bool:
    """Whether parameters alone determine it, a few operations away at most, and it has a gradient."""
    if not tensor.requires_grad:
        return False
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    waiting: list[Node] = [tensor.grad_fn]
    for _ in range(_FARTHEST):
        if not waiting:
            return True
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and not isinstance(variable, nn.Parameter):
            return False
        waiting.extend(source for source, _ in node.next_functions if source is not None)
    return not waiting


_FARTHEST = 8
"""Nodes of the graph between a parameter and the weight that a product takes."""
