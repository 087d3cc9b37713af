"""What a trace keeps: borders as hooks see them, parameters as their modules read them, calls as they are counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.localize import localize
from galv.planner.capture.sample import ModuleCall
from galv.planner.plan import LocalArgument, TensorParallelLayout
from galv.planner.sharding.trace import Border, OwnParameter, Trace, trace_call


class Inner(nn.Module):
    """Takes one argument by position and one by keyword, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.frozen = nn.Parameter(torch.empty(8), requires_grad=False)

    def forward(
        self, x: Tensor, *, scale: Tensor, pair: tuple[Tensor, Tensor], flag: bool = True
    ) -> tuple[Tensor, None, Tensor]:
        y = (x @ self.weight).view(2, 4, 2, 4) + self.frozen.view(2, 4)
        return y.view(2, 4, 8) * scale, None, pair[0] + pair[1]


class Outer(nn.Module):
    """Calls views before, between and after two runs of its inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x.view(8, 8).view(2, 4, 8)
        with torch.no_grad():
            scale = scale * 2
        x, _, _ = self.inner(x, scale=scale, pair=(x, scale))
        return self.inner(x.view(2, 4, 8), scale=scale, pair=(x, x))[0].view(2, 4, 2, 4).flatten(2)


def _trace() -> Trace:
    x, scale = torch.empty(2, 4, 8, device="meta"), torch.empty(2, 4, 1, device="meta", requires_grad=True)
    return trace_call(ModuleCall("", (x,), {"scale": scale}, "0"), Outer().to("meta"))


def test_borders_are_what_hooks_see() -> None:
    """Arguments by position or keyword as the caller gives them, results by position; nothing inside of tuples."""
    borders = [node.mark for node in _trace().nodes_of("border")]

    once = [
        Border("inner", "inputs", "0"),
        Border("inner", "inputs", "scale"),
        Border("inner", "outputs", "0"),
        Border("inner", "outputs", "2"),
    ]
    assert borders == [
        Border("", "inputs", "0"),
        Border("", "inputs", "scale"),
        *once,
        *once,
        Border("", "outputs", "0"),
    ]


def test_parameters_are_read_by_their_module_each_time_it_runs() -> None:
    """Two runs read a parameter twice, under one identity; a frozen one has no gradient."""
    reads = [(node.mark, node.differentiable) for node in _trace().nodes_of("parameter")]

    assert [(mark.path, flows) for mark, flows in reads if isinstance(mark, OwnParameter)] == [
        ("inner.weight", True),
        ("inner.frozen", False),
    ] * 2
    assert reads[0][0] == reads[2][0]


def test_gradients_are_followed() -> None:
    """What is computed without gradients, or from nothing that wants one, has none."""
    nodes = _trace().nodes
    doubled = next(n for n in nodes if n.kind == "operator" and "mul" in str(n.target and n.target.target))

    assert not doubled.differentiable
    assert nodes[-1].differentiable
    assert all(nodes[i].differentiable for i in nodes[-1].inputs)


def test_calls_are_counted_as_local_arguments_are() -> None:
    """A change addressed to a call of the trace reaches that very call when `localize` makes it."""
    trace = _trace()
    sites = [call.site for call in trace.calls if call.site.function == "view" and call.site.module == ""]
    assert [site.occurrence for site in sites] == [0, 1, 2, 3]

    reached = []
    for site in sites:
        argument = LocalArgument(module="", function="view", occurrence=site.occurrence, arguments={0: 99})
        layout = TensorParallelLayout(unit_class="", degree=2, sequence="none", modules=(), local_arguments=(argument,))
        handles = localize(trace.module.get_submodule, layout, lambda x, _: x, lambda m, n: m.get_parameter(n))
        with pytest.raises(RuntimeError, match=r"\[99, ") as error:
            trace.module(*trace.call.args, **trace.call.kwargs)
        reached.append(str(error.value).partition("'")[2].partition("'")[0])
        for handle in handles:
            handle.remove()
    assert reached == ["[99, 8]", "[99, 4, 8]", "[99, 4, 8]", "[99, 4, 2, 4]"]


def test_the_module_is_left_as_it_was() -> None:
    """After a trace, and after one that failed, no hook and no hidden parameter remains."""
    good, bad = Outer().to("meta"), nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9)).to("meta")
    x = torch.empty(2, 4, 8, device="meta")
    trace_call(ModuleCall("", (x, x), {}, "0"), good)
    with pytest.raises(ModelError, match="Sequential cannot be traced"):
        trace_call(ModuleCall("", (x,), {}, "0"), bad)

    for module in (*good.modules(), *bad.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not set(module._parameters) & set(module.__dict__)
