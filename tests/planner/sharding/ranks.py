"""A unit run on several ranks, which are threads of this process, and the same unit run whole.

The change of layout is written here a second time, from its definition in `plan.Layout` alone and with none of torch's
distributed package: put the ranks' tensors together, check what the layout promises, cut again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from galv.localize import localize
from galv.planner.capture.sample import ModuleCall, UnitSample
from galv.planner.plan import Layout, Redistribution, TensorParallelLayout

WAIT_SECONDS = 60


def cut(full: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """The part of `full` that a rank holds; a summand is all of it on rank 0 and nothing elsewhere."""
    if layout.kind == "P":
        return full if rank == 0 else torch.zeros_like(full)
    if layout.kind != "S":
        return full
    assert layout.dim is not None
    return torch.cat(
        [chunk.chunk(degree, layout.dim)[rank] for chunk in full.chunk(layout.chunks, layout.dim)], layout.dim
    )


def joined(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """The tensor of which the ranks hold `parts`; asserts that replicas are equal."""
    if layout.kind == "P":
        return torch.stack(list(parts)).sum(0)
    if layout.kind != "S":
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=1e-6, atol=1e-7)
        return parts[0]
    assert layout.dim is not None
    chunks = [part.chunk(layout.chunks, layout.dim) for part in parts]
    return torch.cat([chunk[c] for c in range(layout.chunks) for chunk in chunks], layout.dim)


_GRADIENT = {"R": Layout(kind="R"), "R+": Layout(kind="P"), "P": Layout(kind="R")}


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a tensor lies."""
    return _GRADIENT.get(layout.kind, layout)


class Group:
    """Ranks that exchange tensors, and the collectives that they used."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.forward: list[str] = []
        self.backward: list[str] = []
        self._barrier = threading.Barrier(degree, timeout=WAIT_SECONDS)
        self._slots: list[Any] = [None] * degree

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""
        self._slots[rank] = tensor
        self._barrier.wait()
        result = list(self._slots)
        self._barrier.wait()
        return result

    def abort(self) -> None:
        """Lets the other ranks fail too."""
        self._barrier.abort()


class _Change(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Redistribution, group: Group, rank: int) -> Tensor:
        ctx.change, ctx.group, ctx.rank = change, group, rank
        if rank == 0:
            group.forward.append(_collective(change.source, change.target))
        full = joined(group.exchange(rank, tensor.detach()), change.source)
        return cut(full, change.target, rank, group.degree).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, (source, target) = ctx.group, (gradient_layout(x) for x in (ctx.change.source, ctx.change.target))
        if ctx.rank == 0:
            group.backward.append(_collective(target, source))
        full = joined(group.exchange(ctx.rank, gradients[0]), target)
        return cut(full, source, ctx.rank, group.degree).clone(), None, None, None


def _collective(source: Layout, target: Layout) -> str:
    if source.kind == "P":
        return {"P": "", "S": "reduce_scatter"}.get(target.kind, "all_reduce")
    if source.kind == "S":
        return "all_gather" if target.kind != "S" else "all_to_all" * (source != target)
    return ""


@dataclass
class Outcome:
    """What a call gives: outputs, and gradients of its tensor arguments and of parameters; None where none flows."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]


def check_equal(unit: UnitSample, call: ModuleCall, layout: TensorParallelLayout, *, tolerance: float) -> Group:
    """The ranks, with the collectives that they used, once outputs and gradients are seen to equal the whole unit's.

    `unit` and `call` hold real tensors; other calls of the unit are left out.
    """
    for parameter in _parameters(unit).values():
        parameter.grad = None
    whole = _run(unit, call, lambda name, x: x, lambda i, x: _upstream(i, x.shape), _parameters(unit, call))
    ranks, group = _run_ranks(unit, call, layout, [x.shape for x in whole.outputs])
    activation, plain = _activation(unit, layout), Layout(kind="R")
    _compare(
        "output", whole.outputs, [r.outputs for r in ranks], [activation, *[plain] * len(whole.outputs)], tolerance
    )
    layouts = [activation if name == call.activation else plain for name, _ in _tensors(call)]
    _compare("input gradient", whole.inputs, [r.inputs for r in ranks], layouts, tolerance)
    stored = _stored(layout)
    for name, gradient in whole.parameters.items():
        _compare(name, [gradient], [[r.parameters[name]] for r in ranks], [stored[name]], tolerance)
    return group


def _compare(
    what: str,
    whole: Sequence[Tensor | None],
    ranks: Sequence[Sequence[Tensor | None]],
    layouts: Sequence[Layout],
    tolerance: float,
) -> None:
    for i, expected in enumerate(whole):
        parts = [rank[i] for rank in ranks]
        if expected is None:
            assert all(part is None or not part.any() for part in parts), f"{what} {i} has a gradient only when sharded"
            continue
        found = joined([part for part in parts if part is not None], layouts[i])
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"{what} {i} as {layouts[i]}: {m}"
        )


def _run_ranks(
    unit: UnitSample, call: ModuleCall, layout: TensorParallelLayout, outputs: list[torch.Size]
) -> tuple[list[Outcome], Group]:
    group = Group(layout.degree)
    copies = [UnitSample(unit.unit_class, copy.deepcopy(unit.modules), ()) for _ in range(layout.degree)]
    with ThreadPoolExecutor(layout.degree, initializer=lambda: torch.set_num_threads(1)) as pool:
        run = [
            pool.submit(_run_rank, own, call, layout, _activation(unit, layout), outputs, group, rank)
            for rank, own in enumerate(copies)
        ]
        return [future.result() for future in run], group


def _run_rank(
    unit: UnitSample,
    call: ModuleCall,
    layout: TensorParallelLayout,
    activation: Layout,
    outputs: list[torch.Size],
    group: Group,
    rank: int,
) -> Outcome:
    """What one rank's thread does."""

    def part(full: Tensor, place: Layout) -> Tensor:
        return cut(full.detach(), place, rank, group.degree)

    try:
        full, paths = _parameters(unit), {id(unit.module(x.module)): x.module for x in layout.modules}
        parts = {
            id(full[name]): part(full[name], place).clone().requires_grad_() for name, place in _stored(layout).items()
        }
        local = {name: parts[id(full[name])] for name in _stored(layout)}  # tied parameters are one here too
        localize(
            unit.module,
            layout,
            lambda tensor, change: _Change.apply(tensor, change, group, rank),
            lambda module, name: local[_path(paths[id(module)], name)],
        )
        return _run(
            unit,
            call,
            lambda name, x: part(x, activation) if name == call.activation else x,
            lambda i, _: part(_upstream(i, outputs[i]), activation) if i == 0 else _upstream(i, outputs[i]),
            local,
        )
    except BaseException:
        group.abort()
        raise


def _run(
    unit: UnitSample,
    call: ModuleCall,
    given: Callable[[str, Tensor], Tensor],
    upstream: Callable[[int, Tensor], Tensor],
    parameters: dict[str, Tensor],
) -> Outcome:
    """Forward and backward; `given` and `upstream` say what becomes of an argument, and of an output's gradient."""
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    wanted = [x.is_floating_point() and (x.requires_grad or name == call.activation) for name, x in _tensors(call)]
    own = iter(
        given(name, x).detach().clone().requires_grad_(flows)
        for (name, x), flows in zip(_tensors(call), wanted, strict=True)
    )
    leaves = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    outputs = [x for x in pytree.tree_leaves(unit.module(call.module)(*args, **kwargs)) if isinstance(x, Tensor)]
    roots = [(x, upstream(i, x)) for i, x in enumerate(outputs) if x.requires_grad]
    torch.autograd.backward([x for x, _ in roots], [gradient for _, gradient in roots])
    inputs = [leaf.grad for leaf in leaves if isinstance(leaf, Tensor)]
    return Outcome([x.detach() for x in outputs], inputs, {name: x.grad for name, x in parameters.items()})


def _upstream(i: int, shape: torch.Size) -> Tensor:
    """The gradient that arrives at output `i`."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))


def _activation(unit: UnitSample, layout: TensorParallelLayout) -> Layout:
    return Layout.parse("S1" if unit.repeated and layout.sequence == "megatron" else "R")


def _tensors(call: ModuleCall) -> list[tuple[str, Tensor]]:
    """Each tensor with the argument that holds it."""
    arguments = [(str(i), value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
    return [(name, x) for name, value in arguments for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _parameters(unit: UnitSample, call: ModuleCall | None = None) -> dict[str, Tensor]:
    """Every parameter of the unit, or of the module that `call` runs, by its name within the unit."""
    roots = [call.module] if call else ["" if len(unit.modules) == 1 else str(i) for i in range(len(unit.modules))]
    return {
        _path(root, name): parameter
        for root in roots
        for name, parameter in unit.module(root).named_parameters(remove_duplicate=False)
    }


def _stored(layout: TensorParallelLayout) -> dict[str, Layout]:
    """How each parameter is stored, by its name within the unit."""
    return {
        _path(part.module, name): change.source for part in layout.modules for name, change in part.parameters.items()
    }


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
