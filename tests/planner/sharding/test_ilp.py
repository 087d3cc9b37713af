"""The integer program against enumeration, and what ties its nodes together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galv.planner.capture.sample import ModuleCall
from galv.planner.plan import SequenceMode
from galv.planner.sharding.choices import Choice, Question, Rates, choices_of
from galv.planner.sharding.ilp import solve
from galv.planner.sharding.trace import Border, Node, OwnParameter, Trace, trace_call


class Mlp(nn.Module):
    """A residual two-layer network."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """Two inner layers and one module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((16, 32), (16, 32), (32, 16)))
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.same(self.gate(x)) * self.same(self.up(x)))


class Twice(nn.Module):
    """One layer that runs twice, and a second one with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.first(x)).tanh())


def traced(module: nn.Module, *shape: int) -> Trace:
    """The trace of a module that takes one tensor."""
    return trace_call(ModuleCall("", (torch.empty(shape, device="meta"),), {}, "0"), module.to("meta"))


MLP, GATED, TWICE = traced(Mlp(), 2, 8, 16), traced(Gated(), 2, 8, 16), traced(Twice(), 2, 8, 16)

RATES = st.builds(
    Rates,
    flops_per_second=st.sampled_from((1e9, 1e12, 1e15)),
    memory_bytes_per_second=st.sampled_from((1e9, 1e12)),
    link_bytes_per_second=st.sampled_from((1e8, 1e11, 1e14)),
    state_bytes_per_byte=st.sampled_from((0.0, 1.0, 16.0)),
)


@settings(max_examples=25)
@given(rates=RATES, trace=st.sampled_from((MLP, GATED, TWICE)), sequence=st.sampled_from(("none", "megatron")))
def test_the_solution_is_the_best_of_all(rates: Rates, trace: Trace, sequence: SequenceMode) -> None:
    """No combination of choices that fit together is cheaper than the one found."""
    choices = choices_of(Question(trace, 2, sequence, rates))
    found = solve(trace.nodes, choices)

    assert found is not None
    assert list(_violations(trace.nodes, found)) == []
    best = min(_all_costs(trace.nodes, choices))
    assert sum(choice.seconds for choice in found) == pytest.approx(best, rel=1e-6)


def test_nothing_to_divide_by_has_no_solution() -> None:
    """A sequence of 8 that should come in 3 parts leaves no choice."""
    assert solve(MLP.nodes, choices_of(Question(MLP, 3, "megatron"))) is None


@pytest.mark.parametrize("sequence", ["none", "megatron"])
def test_a_module_that_runs_twice_has_one_set_of_hooks(sequence: SequenceMode) -> None:
    """Both runs of one module change the same layouts at its border and use its parameters alike."""
    for trace in (GATED, TWICE):
        found = solve(trace.nodes, choices_of(Question(trace, 2, sequence)))

        assert found is not None
        seen: dict[object, object] = {}
        for node, choice in zip(trace.nodes, found, strict=True):
            if isinstance(node.mark, Border):
                assert seen.setdefault(node.mark, choice.change) == choice.change
            if isinstance(node.mark, OwnParameter):
                assert seen.setdefault(node.mark, (choice.stored, choice.output)) == (choice.stored, choice.output)
                assert seen.setdefault(node.mark.identity, choice.stored) == choice.stored


def test_slower_links_never_make_more_traffic() -> None:
    """The bytes moved at borders do not grow when moving them becomes dearer."""
    traffic = []
    for speed in (1e13, 1e11, 1e9, 1e7):
        rates = Rates(link_bytes_per_second=speed, state_bytes_per_byte=0.0)
        found = solve(MLP.nodes, choices_of(Question(MLP, 2, "none", rates)))
        assert found is not None
        seconds = sum(c.seconds for node, c in zip(MLP.nodes, found, strict=True) if node.kind == "border")
        traffic.append(round(seconds * speed))

    assert traffic == sorted(traffic, reverse=True)
    assert traffic[0] > traffic[-1] == 0


def test_the_solver_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is written to standard output or error, not even by the solver's own code."""
    solve(MLP.nodes, choices_of(Question(MLP, 2)))

    assert capfd.readouterr() == ("", "")


def _violations(nodes: tuple[Node, ...], chosen: list[Choice]) -> Iterator[Node]:
    """Nodes that take an input as something it is not."""
    for node, choice in zip(nodes, chosen, strict=True):
        if choice.inputs != tuple(chosen[i].output for i in node.inputs):
            yield node


def _all_costs(nodes: tuple[Node, ...], choices: list[list[Choice]]) -> Iterator[float]:
    """The seconds of every combination in which inputs fit and hooks agree, found by going through all."""

    def extend(chosen: list[Choice], seconds: float) -> Iterator[float]:
        if len(chosen) == len(nodes):
            yield seconds
            return
        node = nodes[len(chosen)]
        for choice in choices[node.index]:
            fits = choice.inputs == tuple(chosen[i].output for i in node.inputs)
            if fits and all(_agree(node, choice, nodes[i], other) for i, other in enumerate(chosen)):
                yield from extend([*chosen, choice], seconds + choice.seconds)

    return extend([], 0.0)


def _agree(node: Node, choice: Choice, other_node: Node, other: Choice) -> bool:
    """Whether two nodes can both be had, if they are hooks or reads of one thing."""
    if isinstance(node.mark, OwnParameter) and isinstance(other_node.mark, OwnParameter):
        if node.mark.identity == other_node.mark.identity and choice.stored != other.stored:
            return False
        return node.mark != other_node.mark or choice.output == other.output
    if isinstance(node.mark, Border) and node.mark == other_node.mark:
        return choice.change == other.change
    return True
