"""What tensor parallelism finds on every family: Megatron's layout on transformer blocks, sensible ones elsewhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from galv.planner.graph import Exclusion, ModelGraph, UnitFacts
from galv.planner.plan import TensorParallelLayout
from tests.families import graph_of

MEGATRON = [
    ("gpt2", "GPT2Block"),
    ("llama", "LlamaDecoderLayer"),
    ("gemma", "GemmaDecoderLayer"),
    ("bert", "BertLayer"),
    ("vit", "ViTLayer"),
    ("clip", "CLIPEncoderLayer"),
    ("whisper", "WhisperEncoderLayer"),
    ("tied", "Block"),
]
MICROBATCH = 4


def shared_out(graph: ModelGraph, unit_class: str) -> tuple[TensorParallelLayout, UnitFacts, UnitFacts]:
    """The layout of a class over two devices, what each then does, and what one does alone."""
    layout = graph.source.layout(unit_class, 2, "none")
    assert not isinstance(layout, Exclusion), layout
    facts = graph.source.facts
    return layout, facts(unit_class, layout, MICROBATCH), facts(unit_class, None, MICROBATCH)


def collectives(facts: UnitFacts) -> Counter[tuple[str, str]]:
    """How many collectives of each kind run in each direction."""
    return Counter((op.collective, op.phase) for op in facts.operators if op.collective is not None)


@pytest.mark.parametrize(("family", "unit_class"), MEGATRON)
def test_transformer_blocks_get_two_all_reduces_a_direction(family: str, unit_class: str, tmp_path: Path) -> None:
    """Half the work on each device, and only the two all-reduces forward and two backward of Megatron's layout."""
    _, ours, alone = shared_out(graph_of(family, tmp_path), unit_class)

    assert collectives(ours) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}
    assert ours.forward_flops == pytest.approx(alone.forward_flops / 2)


def test_t5_blocks_reduce_as_often_and_gather_their_position_bias(tmp_path: Path) -> None:
    """T5's encoder blocks also hand on a bias for each head, which leaves its block whole."""
    graph = graph_of("t5", tmp_path)
    first, second = (collectives(shared_out(graph, name)[1]) for name in ("T5Block", "T5Block.2"))

    assert first["all_reduce", "forward"] == second["all_reduce", "forward"] == 2
    assert first["all_reduce", "backward"] == second["all_reduce", "backward"] == 2
    assert first["all_gather", "forward"] == 1


@pytest.mark.parametrize(
    ("family", "unit_class"), [("graph-net", "GraphLayer"), ("dlrm", "part bottom.0"), ("dlrm", "part top.0")]
)
def test_graph_nets_and_recommenders_share_their_products(family: str, unit_class: str, tmp_path: Path) -> None:
    """Matrix products and their weights are cut in two, with no more than two gathers forward."""
    layout, ours, alone = shared_out(graph_of(family, tmp_path), unit_class)
    sources = [change.source.kind for module in layout.modules for change in module.parameters.values()]

    assert ours.forward_flops == pytest.approx(alone.forward_flops / 2)
    assert set(sources) == {"S"}
    assert sum(n for (_, phase), n in collectives(ours).items() if phase == "forward") <= 2


def test_embedding_tables_of_a_recommender_are_cut(tmp_path: Path) -> None:
    """Of DLRM's big tables each device holds a part."""
    graph = graph_of("dlrm", tmp_path)
    layout, _, _ = shared_out(graph, "part 2")

    assert any(c.source.kind == "S" for module in layout.modules for c in module.parameters.values())
