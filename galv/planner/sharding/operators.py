"""Factors of the operators that compute, and the table of all operators that are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from galv.planner.sharding import shapes
from galv.planner.sharding.factors import (
    Builder,
    Dims,
    Factors,
    argument,
    broadcast,
    linear_in,
    operator_name,
    positions,
)

Reader = Callable[[Builder, fx.Node], Factors]


def factors_of(node: fx.Node, *, divides_rows: bool = False) -> Factors:
    """The correspondence of dims in an aten call whose nodes carry their values in `meta["val"]`.

    An operator that is neither in the table nor tagged as pointwise by torch is opaque: its tensors stay whole.
    `divides_rows`: products may be cut along samples and sequence, for the axis sums the gradients of weights.
    """
    build = Builder.of(node)
    build.divides_rows = divides_rows
    reader = _READERS.get(operator_name(node))
    if reader is not None:
        return reader(build, node)
    return pointwise(build, node) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else build.opaque()


# ----------------------------------------------------------------------------------------------- along every dim


def pointwise(build: Builder, node: fx.Node) -> Factors:
    """Element by element, with broadcasting."""
    dims = build.fresh(build.output)
    inputs = [broadcast(dims, shape, build.output) for shape in build.inputs]
    return build.done(inputs, dims, linear=_pointwise_linear(operator_name(node), len(inputs)))


def where(build: Builder, node: fx.Node) -> Factors:
    """A choice, element by element; with a condition alone it finds positions."""
    return pointwise(build, node) if len(node.args) == 3 else build.opaque()


def _pointwise_linear(name: str, num_tensors: int) -> tuple[frozenset[int], ...]:
    if name in ("add", "sub", "subtract"):
        return linear_in({0, 1}) if num_tensors == 2 else ()
    if name in ("mul", "multiply"):
        return linear_in(*({i} for i in range(num_tensors)))
    return linear_in({0}) if name in ("div", "divide", "true_divide", "neg", "negative", *_COPIES) else ()


_COPIES = ("to", "_to_copy", "contiguous", "clone", "alias", "type_as", "lift_fresh_copy")
_UNTAGGED = (
    *_COPIES,
    *("subtract", "multiply", "divide", "true_divide", "floor_divide", "rsub", "negative", "absolute"),
    *("less", "less_equal", "greater", "greater_equal", "not_equal", "__and__", "__or__"),
    *("hardswish", "log_sigmoid"),
    *("detach", "dropout", "alpha_dropout", "feature_dropout", "bernoulli", "masked_fill", "copy"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)


def _fixed_along(position: int, name: str, default: int | None = None) -> Reader:
    """A reader for operators that mix values along the dims given by one argument and keep the shape."""

    def read(build: Builder, node: fx.Node) -> Factors:
        rank = len(build.output)
        dims = build.fresh(build.output, fixed=positions(argument(node, position, name, default), rank))
        return build.done([dims, *(tuple(() for _ in shape) for shape in build.inputs[1:])], dims)

    return read


def _fixed_matrix(build: Builder, node: fx.Node) -> Factors:
    rank = len(build.output)
    dims = build.fresh(build.output, fixed=(rank - 2, rank - 1))
    return build.done([dims], dims, linear=linear_in({0}))


def normalization(build: Builder, node: fx.Node) -> Factors:
    """Layer and RMS normalization over the last dims, with an optional weight and bias over these."""
    rank, count = len(build.output), len(argument(node, 1, "normalized_shape"))
    dims = build.fresh(build.output, fixed=range(rank - count, rank))
    return build.done([dims, *[dims[rank - count :]] * (len(build.inputs) - 1)], dims)


def reduction(build: Builder, node: fx.Node) -> Factors:
    """Sums, means, extremes over dims. Only sums of parts add up to the sum of the whole."""
    name, rank = operator_name(node), len(build.inputs[0])
    reduced = positions(argument(node, 1, "dim"), rank)
    dims = build.fresh(build.inputs[0], fixed=() if name == "sum" else reduced)
    keep = len(build.output) == rank
    output = tuple(() if i in reduced else dim for i, dim in enumerate(dims) if keep or i not in reduced)
    summed = frozenset(factor for i in reduced for factor in dims[i]) if name == "sum" else frozenset()
    return build.done([dims], output, summed=summed, linear=linear_in({0}) if name in ("sum", "mean") else ())


# ----------------------------------------------------------------------------------------------- products


def linear(build: Builder, node: fx.Node) -> Factors:
    """x @ weight.T + bias."""
    rows = _rows(build, build.inputs[0])
    outer, inner = build.fresh(build.inputs[1])
    inputs = [(*rows, inner), (outer, inner), (outer,)][: len(build.inputs)]
    return _product(build, inputs, (*rows, outer), inner, bias=2 if len(inputs) == 3 else None)


def addmm(build: Builder, node: fx.Node) -> Factors:
    """bias + x @ weight."""
    rows = _rows(build, build.inputs[1])
    inner, outer = build.fresh(build.inputs[2])
    output = (*rows, outer)
    bias = broadcast(output, build.inputs[0], build.output)
    return _product(build, [bias, (*rows, inner), (inner, outer)], output, inner, bias=0)


def matmul(build: Builder, node: fx.Node) -> Factors:
    """x @ y, matrices broadcast over leading dims."""
    x, y = build.inputs
    if len(x) < 2 or len(y) < 2:
        return build.opaque()
    if len(y) == 2:
        rows = _rows(build, x)
        inner, outer = build.fresh(y)
        return _product(build, [(*rows, inner), (inner, outer)], (*rows, outer), inner)
    batch, shape = build.fresh(build.output[:-2]), build.output[:-2]
    (row,), inner, (outer,) = build.fresh(x[-2:-1]), build.new(x[-1]), build.fresh(y[-1:])
    inputs = [(*broadcast(batch, x[:-2], shape), row, inner), (*broadcast(batch, y[:-2], shape), inner, outer)]
    return _product(build, inputs, (*batch, row, outer), inner)


def baddbmm(build: Builder, node: fx.Node) -> Factors:
    """z + x @ y, one matrix each a batch."""
    batch, row, outer = build.fresh(build.output)
    inner = build.new(build.inputs[1][-1])
    output = (batch, row, outer)
    inputs = [broadcast(output, build.inputs[0], build.output), (batch, row, inner), (batch, inner, outer)]
    return _product(build, inputs, output, inner, bias=0)


def einsum(build: Builder, node: fx.Node) -> Factors:
    """A product given by an equation in which no tensor repeats a letter."""
    terms, _, result = str(node.args[0]).replace(" ", "").partition("->")
    names = terms.split(",")
    if "." in terms or not result or any(len(set(n)) < len(n) for n in names):
        return build.opaque()
    sizes = [pair for n, shape in zip(names, build.inputs, strict=True) for pair in zip(n, shape, strict=True)]
    dims = {letter: build.new(size) for letter, size in dict(sizes).items()}
    inputs = [tuple(dims[letter] for letter in n) for n in names]
    summed = frozenset(f for letter, dim in dims.items() if letter not in result for f in dim)
    single = linear_in(*({i} for i in range(len(names))))
    output = tuple(dims[letter] for letter in result)
    return build.done(inputs, output, summed=summed, linear=single, is_product=True)


def _rows(build: Builder, shape: Sequence[int]) -> Dims:
    """The dims of a left operand before the summed one, where the right operand is one matrix.

    The first two are a batch and a sequence. On the tensor axis they stay whole: to cut them is data or context
    parallelism, with the weight's gradient to be summed, and a plan has other axes for that.
    """
    return build.fresh(shape[:-1], fixed=() if build.divides_rows else (0, 1))


def _product(
    build: Builder, inputs: Sequence[Dims], output: Dims, inner: tuple[int, ...], bias: int | None = None
) -> Factors:
    added = () if bias is None else (bias,)
    factors = [i for i in range(len(inputs)) if i != bias]
    return build.done(
        inputs,
        output,
        summed=frozenset(inner),
        addends=frozenset(added),
        linear=linear_in(*({i, *added} for i in factors)),
        is_product=True,
    )


def grouped_product(build: Builder, node: fx.Node) -> Factors:
    """Rows in groups, each with a matrix of its own. The groups stay whole: they are no equal parts."""
    rows, matrices, *rest = build.inputs
    if len(rows) != 2 or len(matrices) != 3:
        return build.opaque()
    row, inner = build.new(rows[0], fixed=True), build.new(rows[1])
    outer = build.new(matrices[2])
    inputs = [(row, inner), ((), inner, outer), *(tuple(() for _ in shape) for shape in rest)]
    return _product(build, inputs, (row, outer), inner)


def index(build: Builder, node: fx.Node) -> Factors:
    """Rows picked by one tensor of positions."""
    table, *picks = build.inputs
    listed = argument(node, 1, "indices")
    if len(picks) != 1 or not isinstance(listed[0], fx.Node):
        return build.opaque()
    rest = build.fresh(table[1:])
    picked = build.fresh(picks[0], fixed=range(len(picks[0])))
    return build.done([((), *rest), picked], (*picked, *rest), linear=linear_in({0}))


def attention(build: Builder, node: fx.Node) -> Factors:
    """Fused attention of (..., heads, length, size). Query heads come in equal groups, one for each key head."""
    query, key, value = build.inputs[:3]
    if len(query) < 4 or query[-3] % key[-3]:
        return build.opaque()
    batch = build.fresh(query[:-3])
    heads, group = build.new(key[-3]), build.new(query[-3] // key[-3])
    queries, keys, size = build.fresh((query[-2], key[-2], query[-1]), fixed=(0, 1, 2))
    values = build.new(value[-1], fixed=True)
    inputs = [(*batch, heads + group, queries, size), (*batch, heads, keys, size), (*batch, heads, keys, values)]
    scores = (*batch, heads + group, queries, keys)
    inputs += [broadcast(scores, shape, (*query[:-1], key[-2])) for shape in build.inputs[3:]]
    return build.done(inputs, (*batch, heads + group, queries, values), is_product=True)


def embedding(build: Builder, node: fx.Node) -> Factors:
    """Rows of a table. The table's rows stay whole: a rank would have to shift and mask the indices."""
    table, indices = build.inputs
    rows, width = build.fresh(table, fixed=(0,))
    tokens = build.fresh(indices, fixed=range(len(indices)))
    return build.done([(rows, width), tokens], (*tokens, width), linear=linear_in({0}))


def uniform(build: Builder, node: fx.Node) -> Factors:
    """A tensor filled with one value."""
    return build.done([], build.fresh(build.output), is_uniform=not build.inputs)


def convolution(build: Builder, node: fx.Node) -> Factors:
    """An ungrouped convolution, along channels only."""
    if argument(node, 6, "groups", 1) != 1 or len(build.inputs[0]) != len(build.inputs[1]):
        return build.opaque()
    samples, outer = build.new(build.output[0], fixed=True), build.new(build.output[1])
    inner = build.new(build.inputs[0][1])
    space = build.fresh(build.inputs[0][2:], fixed=range(3))
    kernel = build.fresh(build.inputs[1][2:], fixed=range(3))
    moved = build.fresh(build.output[2:], fixed=range(3))
    inputs = [(samples, inner, *space), (outer, inner, *kernel), (outer,)][: len(build.inputs)]
    return _product(build, inputs, (samples, outer, *moved), inner, bias=2 if len(inputs) == 3 else None)


_READERS: dict[str, Reader] = {
    **dict.fromkeys(_UNTAGGED, pointwise),
    "where": where,
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_as", "reshape_as"), shapes.view),
    **dict.fromkeys(("flatten", "unflatten", "squeeze", "unsqueeze"), shapes.view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "permute", "movedim", "t", "numpy_T", "mT"), shapes.permute),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), shapes.expand),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), shapes.split),
    **dict.fromkeys(("select", "unbind"), shapes.select),
    **dict.fromkeys(("cat", "concat", "concatenate"), shapes.cat),
    "slice": shapes.slice_,
    "stack": shapes.stack,
    "getitem": shapes.getitem,
    "repeat": shapes.repeat,
    "repeat_interleave": shapes.repeat_interleave,
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod"), _fixed_along(1, "dim")),
    **dict.fromkeys(("tril", "triu"), _fixed_matrix),
    **dict.fromkeys(("layer_norm", "rms_norm"), normalization),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), reduction),
    "linear": linear,
    "addmm": addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    "baddbmm": baddbmm,
    "_grouped_mm": grouped_product,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    "index": index,
    **dict.fromkeys(("zeros", "ones", "full"), uniform),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
}
