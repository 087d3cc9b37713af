"""Every rule of every operator is carried out on parts and compared with the whole, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from galv.planner.plan import Layout
from galv.planner.sharding.factors import operator_name, tensor_arguments
from galv.planner.sharding.operators import factors_of
from galv.planner.sharding.place import PARTIAL, USED, WHOLE, Place, divides, local_shape, shard
from galv.planner.sharding.rules import Rule, rules
from tests.planner.sharding.ranks import cut, gradient_layout, joined

DEGREE = 2


class Reshape:
    """A reshape to constant sizes, which a rank replaces by its local ones."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.sizes)

    def for_rank(self, output: Place) -> Reshape:
        """The same on a rank that is to get its part of the output."""
        return Reshape(*local_shape(self.sizes, output, DEGREE))


# For each case: the function, written as a model would write it so that it runs on shards; the shapes of its inputs;
# and rules that must be among those found, as "input input -> output".
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], list[str]]] = {
    "linear": (
        F.linear,
        [(2, 3, 8), (6, 8), (6,)],
        ["R+ S0 S0 -> S2", "S2 S1 P -> P", "R R R -> R", "R+ R+ R+ -> R+", "P R+ P -> P"],
    ),
    "linear without bias, cut in chunks": (F.linear, [(2, 3, 8), (12, 8)], ["R+ S0x3 -> S2x3", "S2x2 S1x2 -> P"]),
    "linear on heads": (F.linear, [(2, 3, 4, 8), (6, 8)], ["S2 R+ -> S2"]),
    "addmm": (torch.addmm, [(6,), (5, 8), (8, 6)], ["S0 R+ S1 -> S1", "P S1 S0 -> P", "S0x3 R+ S1x3 -> S1x3"]),
    "matmul, batched": (torch.matmul, [(2, 4, 3, 8), (2, 4, 8, 6)], ["S1 S1 -> S1", "S3 S2 -> P", "R+ S3 -> S3"]),
    "matmul, broadcast": (torch.matmul, [(2, 4, 3, 8), (1, 1, 8, 6)], ["S0 R+ -> S0", "S3 S2 -> P"]),
    "matmul with a matrix": (torch.matmul, [(2, 3, 8), (8, 6)], ["R+ S1 -> S2", "S2 S0 -> P", "R+ P -> P"]),
    "bmm": (torch.bmm, [(4, 3, 8), (4, 8, 6)], ["S0 S0 -> S0", "S2 S1 -> P"]),
    "baddbmm": (torch.baddbmm, [(4, 1, 6), (4, 3, 8), (4, 8, 6)], ["S0 S0 S0 -> S0", "S2 R+ S2 -> S2", "P S2 S1 -> P"]),
    "einsum": (
        lambda x, y: torch.einsum("bshd,hde->bse", x, y),
        [(2, 3, 4, 8), (4, 8, 6)],
        ["S2 S0 -> P", "S3 S1 -> P", "R+ S2 -> S2"],
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [(2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)],
        ["S1 S1 S1 -> S1", "S0 S0 S0 -> S0"],
    ),
    "attention, grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 8, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)],
        ["S1 S1 S1 -> S1", "S1x4 R+ R+ -> S1x4"],
    ),
    "attention, one key head": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 8, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8)],
        ["S1 R+ R+ -> S1"],
    ),
    "attention with a bias per head": (
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        [(2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8), (1, 4, 3, 3)],
        ["S1 S1 S1 S1 -> S1"],
    ),
    "attention with one bias": (
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        [(2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8), (2, 1, 3, 3)],
        ["S1 S1 S1 R+ -> S1", "S0 S0 S0 S0 -> S0"],
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(2, 4, 8), (8,), (8,)], ["S1 R+ R+ -> S1"]),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), [(2, 4, 8), (8,)], ["S1 R+ -> S1", "R R -> R"]),
    "softmax": (lambda x: F.softmax(x, -1), [(2, 4, 3)], ["S1 -> S1", "R+ -> R+"]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [(2, 4, 6)], ["S1 -> S1", "P -> P"]),
    "sum": (lambda x: x.sum(-1), [(2, 4, 6)], ["S1 -> S1", "S2 -> P", "S2x3 -> P", "P -> P"]),
    "sum of everything": (lambda x: x.sum(), [(2, 4, 6)], ["S1 -> P"]),
    "add": (torch.add, [(2, 4, 6), (6,)], ["S1 R+ -> S1", "S2 S0 -> S2", "P P -> P", "S2x3 S0x3 -> S2x3"]),
    "mul": (torch.mul, [(2, 4, 6), (2, 4, 1)], ["S2 R+ -> S2", "S1 S1 -> S1", "P R+ -> P", "R+ P -> P"]),
    "square of one tensor": (lambda x: x * x, [(2, 4)], ["S1 S1 -> S1", "R R -> R"]),
    "shift": (lambda x: x + 1.0, [(2, 4)], ["S1 -> S1", "R+ -> R+"]),
    "div": (torch.div, [(2, 4), (4,)], ["P R+ -> P", "S1 S0 -> S1"]),
    "silu": (lambda x: F.silu(x), [(2, 4)], ["S1 -> S1", "R -> R"]),
    "where": (
        lambda x, y: torch.where(x.detach() > 0, x, y),
        [(4, 3, 6), (4, 1, 6)],
        ["S0 S0 S0 -> S0", "S2 S2 S2 -> S2"],
    ),
    "view into heads": (Reshape(2, 3, 6, 4), [(2, 3, 24)], ["S2 -> S2", "S2x3 -> S2x3", "S2x6 -> S3"]),
    "view into a triple of heads": (Reshape(2, 5, 3, 2, 4), [(2, 5, 24)], ["S2x3 -> S3", "P -> P"]),
    "reshape out of heads": (Reshape(2, 3, 24), [(2, 3, 6, 4)], ["S2 -> S2", "S3 -> S2x6"]),
    "reshape of batch and sequence": (Reshape(12, 6), [(3, 4, 6)], ["S1 -> S0x3", "S2 -> S1"]),
    "reshape across dims": (Reshape(4, 3, 2), [(2, 12)], ["S0 -> S0", "S1 -> S0x2"]),
    "reshape without a common divisor": (Reshape(9, 4), [(4, 9)], []),
    "unsqueeze": (lambda x: x.unsqueeze(1), [(2, 6)], ["S1 -> S2"]),
    "transpose": (lambda x: x.transpose(1, 2), [(2, 3, 4)], ["S2 -> S1"]),
    "permute": (lambda x: x.permute(2, 0, 1), [(2, 3, 4)], ["S2 -> S0"]),
    "movedim": (lambda x: torch.movedim(x, 0, -1), [(4, 3, 5)], ["S0 -> S2"]),
    "matrix transpose": (lambda x: x.mT, [(2, 3, 4)], ["S2 -> S1"]),
    "expand": (lambda x: x.expand(-1, 3, -1), [(2, 1, 4)], ["S2 -> S2"]),
    "repeat": (lambda x: x.repeat(1, 3), [(2, 4)], ["S1 -> S1x3"]),
    "repeat interleave": (lambda x: x.repeat_interleave(3, dim=1), [(2, 4, 5)], ["S1 -> S1"]),
    "half of a dim": (lambda x: x[..., x.shape[-1] // 2 :], [(2, 8)], ["S1x2 -> S1"]),
    "third of a dim": (lambda x: x.chunk(3, -1)[1], [(2, 12)], ["S1x3 -> S1"]),
    "one of a triple": (lambda x: x[:, 1], [(4, 3, 6)], ["S2 -> S1"]),
    "cat": (lambda x, y: torch.cat((x, y), -1), [(2, 4), (2, 4)], ["S1 S1 -> S1x2", "P P -> P"]),
    "cat of unequal": (lambda x, y: torch.cat((x, y), -1), [(4, 4), (4, 2)], ["S0 S0 -> S0"]),
    "stack": (lambda x, y: torch.stack((x, y), 1), [(2, 4), (2, 4)], ["S1 S1 -> S2"]),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 2, 0]]), w), [(5, 8)], ["S1 R -> S2", "P R -> P"]),
    "convolution": (F.conv2d, [(2, 4, 5, 5), (6, 4, 3, 3), (6,)], ["R+ S0 S0 -> S1", "S1 S1 P -> P"]),
    "upper triangle": (torch.triu, [(4, 3, 3)], ["S0 -> S0"]),
    "running sum": (lambda x: x.cumsum(1), [(4, 3)], ["S0 -> S0"]),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_whole(case: str) -> None:
    """Whatever rule is applied, the parts of outputs and of gradients make up those of the whole operator."""
    function, shapes, expected = CASES[case]
    tensors = [_random(shape, seed) for seed, shape in enumerate(shapes)]
    node, placeholders = _operator(function, tensors)
    found = _rules(node)

    assert set(expected) <= {_text(rule) for rule in found}
    for rule in found:
        places: dict[str, set[Place]] = {}
        for argument, place in zip(tensor_arguments(node), rule.inputs, strict=True):
            places.setdefault(argument.name, set()).add(place)
        if all(len(places[name]) == 1 for name in placeholders):  # a tensor that is given twice lies in one way
            _check(function, tensors, [next(iter(places[name])) for name in placeholders], rule)


def test_an_unknown_operator_stays_whole() -> None:
    """Without knowledge of an operator nothing is cut, and a partial sum does not pass."""
    node, _ = _operator(lambda x: torch.logcumsumexp(x, -1), [_random((4, 4), 0)])

    assert {_text(rule) for rule in _rules(node)} == {"R -> R", "R+ -> R+"}


def test_a_batch_is_not_cut_where_a_weight_would_be_shared() -> None:
    """Samples and sequence of a linear layer's input stay whole: to cut them is data parallelism."""
    node, _ = _operator(F.linear, [_random((4, 4, 8), 0), _random((6, 8), 1)])

    assert not [rule for rule in _rules(node) if rule.inputs[0] in (shard(0), shard(1))]


def test_heads_that_do_not_divide_are_not_cut() -> None:
    """A view into 3 heads of 4 passes no cut in two, although the width of 12 could be cut."""
    node, _ = _operator(Reshape(2, 5, 3, 4), [_random((2, 5, 12), 0)])

    assert "S2 -> S2" not in {_text(rule) for rule in _rules(node)}


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _operator(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[fx.Node, list[str]]:
    """The last operator that `function` calls, and the names of the function's inputs."""
    graph = make_fx(function, pre_dispatch=True)(*(x.detach() for x in tensors)).graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = getattr(graph.owning_module, str(node.target))
    return [x for x in graph.nodes if x.op == "call_function" and operator_name(x) != "getitem"][-1], names


def _rules(node: fx.Node) -> list[Rule]:
    given, grads = [], []
    for argument in tensor_arguments(node):
        value = argument.meta["val"]
        shards = (shard(dim, chunks) for dim in range(value.dim()) for chunks in range(1, 7))
        given.append({WHOLE, USED, PARTIAL, *(x for x in shards if divides(tuple(value.shape), x, DEGREE))})
        grads.append(value.is_floating_point())
    return rules(factors_of(node), given, grads, True, DEGREE)


def _text(rule: Rule) -> str:
    return f"{' '.join(map(str, rule.inputs))} -> {rule.output}"


def _check(function: Callable[..., Tensor], tensors: list[Tensor], places: list[Place], rule: Rule) -> None:
    layouts, output_layout = [Layout.parse(str(place)) for place in places], Layout.parse(str(rule.output))
    whole = function(*tensors)
    upstream = _random(tuple(whole.shape), 9).detach()
    gradients = torch.autograd.grad(whole, tensors, upstream, retain_graph=True)
    parts = [_parts(tensor.detach(), layout) for tensor, layout in zip(tensors, layouts, strict=True)]
    arriving = _parts(upstream, gradient_layout(output_layout))
    outputs, returned = [], []
    for rank in range(DEGREE):
        local = [part[rank].clone().requires_grad_() for part in parts]
        run = function.for_rank(rule.output) if isinstance(function, Reshape) else function
        outputs.append(run(*local))
        returned.append(torch.autograd.grad(outputs[-1], local, arriving[rank]))
    torch.testing.assert_close(joined([x.detach() for x in outputs], output_layout), whole.detach(), msg=_text(rule))
    for i, layout in enumerate(layouts):
        found = joined([gradient[i] for gradient in returned], gradient_layout(layout))
        torch.testing.assert_close(found, gradients[i], msg=f"gradient {i} of {_text(rule)}")


def _parts(full: Tensor, layout: Layout) -> list[Tensor]:
    """Every rank's part; summands are any that add up."""
    if layout.kind != "P":
        return [cut(full, layout, rank, DEGREE) for rank in range(DEGREE)]
    share = _random(tuple(full.shape), 7).detach()
    return [share, full - share]
