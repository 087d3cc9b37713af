"""Facts of a block whose sequence is cut: what one rank computes, keeps and says to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.graph import Exclusion, ModelGraph, Phase, UnitFacts
from galv.planner.plan import ContextMode, SequenceLayout, TensorParallelLayout

SEQ_LEN, SAMPLES, HEADS, KEY_HEADS, HEAD_DIM = 32, 3, 4, 2, 8
CP = 4
Config = Callable[..., str]


@cache
def _graph(path: str, device: str) -> tuple[ModelGraph, str]:
    graph = capture(resolve_model(path, seq_len=SEQ_LEN), precision="bf16", device_kind=device)  # type: ignore[arg-type]
    return graph, next(unit.unit_class for unit in graph.units if unit.name not in ("embedding", "head"))


def _facts(graph: ModelGraph, block: str, mode: ContextMode, degree: int = CP, tp: int = 1) -> UnitFacts:
    sequence = graph.source.sequence_layout(block, mode, degree, tp=tp)
    assert isinstance(sequence, SequenceLayout), sequence
    return graph.source.facts(block, _tensor(graph, block, tp), SAMPLES, sequence=sequence)


def _tensor(graph: ModelGraph, block: str, tp: int) -> TensorParallelLayout | None:
    layout = None if tp == 1 else graph.source.layout(block, tp, "none")
    assert not isinstance(layout, Exclusion), layout
    return layout


def _said(facts: UnitFacts, phase: Phase) -> Counter[tuple[str | None, float]]:
    return Counter((op.collective, op.bytes_read) for op in facts.phase(phase) if op.axis == "context")


def _flops(facts: UnitFacts, kind: str) -> float:
    return sum(op.flops for op in facts.operators if op.kind == kind)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_one_rank_does_and_keeps_its_share(config: Config, device: str, mode: ContextMode) -> None:
    """Products and attention are divided by the ranks, so is what is kept; what is exchanged comes to it."""
    graph, block = _graph(config("llama"), device)
    whole, part = graph.source.facts(block, None, SAMPLES), _facts(graph, block, mode)

    assert _flops(part, "matmul") == _flops(whole, "matmul") / CP
    # A ring skips what causal attention does not see; its own part counts whole, as whole attention does.
    share = 1 / CP if mode == "ulysses" else (1 + (CP - 1) / 2) / CP**2
    assert _flops(part, "attention") == pytest.approx(_flops(whole, "attention") * share)
    assert part.input_bytes == whole.input_bytes / CP
    assert part.output_bytes == whole.output_bytes / CP
    assert whole.saved_bytes / CP <= part.saved_bytes < 1.3 * whole.saved_bytes / CP


def test_what_is_said(config: Config) -> None:
    """Ulysses: four exchanges each way. A ring: keys and values go round, in backward with their gradients."""
    graph, block = _graph(config("llama"), "cuda")
    query = SAMPLES * HEADS * SEQ_LEN // CP * HEAD_DIM * 2
    key = SAMPLES * KEY_HEADS * SEQ_LEN // CP * HEAD_DIM * 2
    repeated = key * CP // KEY_HEADS

    ulysses = _facts(graph, block, "ulysses")
    assert _said(ulysses, "forward") == Counter({("all_to_all", query): 2}) + Counter({("all_to_all", repeated): 2})
    assert _said(ulysses, "backward") == _said(ulysses, "forward")
    ring = _facts(graph, block, "ring")
    assert _said(ring, "forward") == {("p2p", 2 * key): CP - 1}
    assert _said(ring, "backward") == {("p2p", 2 * key): CP - 1, ("p2p", 4 * key): CP}, "gradients in single precision"


def test_beside_a_tensor_axis(config: Config) -> None:
    """Each rank has some heads of its part; collectives of either axis say which they are of."""
    graph, block = _graph(config("llama"), "cuda")
    alone, both = _facts(graph, block, "ring", 2), _facts(graph, block, "ring", 2, tp=2)

    assert _flops(both, "matmul") == _flops(alone, "matmul") / 2
    assert {op.axis for op in both.operators if op.collective} == {"context", "tensor"}
    (message,) = _said(both, "forward")
    assert message == ("p2p", SAMPLES * SEQ_LEN * HEAD_DIM * 2)
