"""One rank's share of a tensor-parallel unit: local shapes, the collectives of both directions, local memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from galv.errors import ModelError
from galv.planner.capture import capture
from galv.planner.capture.emulate import Emulation
from galv.planner.capture.source import resolve_model
from galv.planner.capture.trace import Recorder, Trace
from galv.planner.graph import ModelGraph, Phase, UnitFacts
from galv.planner.plan import Layout, ModuleLayout, Redistribution, SequenceMode, TensorParallelLayout
from tests.layouts import llama_layouts

SEQ_LEN, MICROBATCH, DEGREE = 32, 2, 2
WHOLE_BYTES = MICROBATCH * SEQ_LEN * 32 * 2
"""The activation of the small Llama in bf16."""
Config = Callable[..., str]


@pytest.fixture
def graph(config: Config) -> ModelGraph:
    """A small Llama, traced as a GPU would run it."""
    return capture(resolve_model(config("llama"), seq_len=SEQ_LEN), precision="bf16", device_kind="cuda")


def facts(graph: ModelGraph, unit_class: str, sequence: SequenceMode = "none") -> UnitFacts:
    """The facts of a unit under the layout written by hand."""
    embedding, block, head = llama_layouts(DEGREE, sequence)
    layout = {"embedding": embedding, "LlamaDecoderLayer": block, "head": head}[unit_class]
    return graph.source.facts(unit_class, layout, MICROBATCH)


def collectives(facts: UnitFacts, phase: Phase) -> list[tuple[str, float]]:
    """(kind, bytes of the full tensor) of each collective of one direction."""
    return [(op.name, op.bytes_read) for op in facts.phase(phase) if op.kind == "collective"]


def test_products_have_local_shapes(graph: ModelGraph) -> None:
    """At degree 2, projections lose half of their outputs or inputs, and attention half of its heads."""
    products = [op for op in facts(graph, "LlamaDecoderLayer").phase("forward") if op.matmul]
    tokens = MICROBATCH * SEQ_LEN
    sizes = {op.module: op.matmul[1:] for op in products if op.matmul}
    attention = [op.attention for op in facts(graph, "LlamaDecoderLayer").operators if op.attention]

    assert sizes["self_attn.q_proj"] == (tokens, 16, 32)
    assert sizes["self_attn.k_proj"] == (tokens, 8, 32)
    assert sizes["self_attn.o_proj"] == (tokens, 32, 16)
    assert sizes["mlp.up_proj"] == (tokens, 32, 32)
    assert sizes["mlp.down_proj"] == (tokens, 32, 32)
    assert attention == [(MICROBATCH, 2, SEQ_LEN, SEQ_LEN, 8, True)] * 2


@pytest.mark.parametrize("sequence", ["none", "megatron"])
def test_flops_are_halved(graph: ModelGraph, sequence: SequenceMode) -> None:
    """A rank of two does half of the block's FLOPs, forward and backward."""
    whole = graph.source.facts("LlamaDecoderLayer", None, MICROBATCH)
    local = facts(graph, "LlamaDecoderLayer", sequence)
    assert (local.forward_flops, local.backward_flops) == (whole.forward_flops / 2, whole.backward_flops / 2)


def test_megatron_tensor_parallel_reduces_twice_each_way(graph: ModelGraph) -> None:
    """Attention and MLP each end in an all-reduce of the activation, and begin with one in backward."""
    block = facts(graph, "LlamaDecoderLayer")
    assert collectives(block, "forward") == [("all_reduce", WHOLE_BYTES)] * 2
    assert collectives(block, "backward") == [("all_reduce", WHOLE_BYTES)] * 2


def test_sequence_sharding_gathers_and_scatters(graph: ModelGraph) -> None:
    """With the sequence sharded, each region gathers in front and reduce-scatters behind, and mirrored backward;
    the norms' weights see a part of the tokens each, so their gradients are summed."""
    block = facts(graph, "LlamaDecoderLayer", "megatron")
    pair = [("all_gather", WHOLE_BYTES), ("reduce_scatter", WHOLE_BYTES)]
    assert collectives(block, "forward") == pair * 2
    assert collectives(block, "backward") == [*pair, ("all_reduce", 32 * 2)] * 2


def test_sequence_sharding_cuts_what_is_kept(graph: ModelGraph) -> None:
    """With the sequence sharded the borders hold half an activation, and less is kept for backward."""
    plain, sharded = facts(graph, "LlamaDecoderLayer"), facts(graph, "LlamaDecoderLayer", "megatron")
    assert (plain.input_bytes, plain.output_bytes) == (WHOLE_BYTES, WHOLE_BYTES)
    assert (sharded.input_bytes, sharded.output_bytes) == (WHOLE_BYTES / 2, WHOLE_BYTES / 2)
    assert sharded.saved_bytes < plain.saved_bytes < graph.source.facts("LlamaDecoderLayer", None, 2).saved_bytes


def test_embedding_and_head_are_local_too(graph: ModelGraph) -> None:
    """Embedding and head compute on local weights and give whole activations: their gathers are recorded."""
    logits = MICROBATCH * SEQ_LEN * 96 * 2
    embedding, head = facts(graph, "embedding"), facts(graph, "head")
    assert collectives(embedding, "forward") == [("all_gather", WHOLE_BYTES)]
    assert collectives(head, "forward") == [("all_gather", logits)]
    assert collectives(head, "backward") == [("all_reduce", WHOLE_BYTES)]
    assert head.forward_flops == graph.source.facts("head", None, MICROBATCH).forward_flops / 2


# ----------------------------------------------------------------------------------------------- layout algebra

ALGEBRA = [
    ("R", "R+", (8, 4), (8, 4), [], ["all_reduce"]),
    ("S0", "R+", (4, 4), (8, 4), ["all_gather"], ["reduce_scatter"]),
    ("S1", "R+", (8, 2), (8, 4), ["all_gather"], ["reduce_scatter"]),
    ("P", "R", (8, 4), (8, 4), ["all_reduce"], []),
    ("P", "R+", (8, 4), (8, 4), ["all_reduce"], ["all_reduce"]),
    ("P", "S0", (8, 4), (4, 4), ["reduce_scatter"], ["all_gather"]),
    ("P", "S1", (8, 4), (8, 2), ["reduce_scatter"], ["all_gather"]),
    ("S0", "R", (4, 4), (8, 4), ["all_gather"], []),
    ("S1", "R", (8, 2), (8, 4), ["all_gather"], []),
    ("R", "S0", (8, 4), (4, 4), [], ["all_gather"]),
    ("R", "S1", (8, 4), (8, 2), [], ["all_gather"]),
    ("R", "P", (8, 4), (8, 4), [], []),
    ("S0", "S1", (4, 4), (8, 2), ["all_to_all"], ["all_to_all"]),
    ("S0x2", "R", (4, 4), (8, 4), ["all_gather"], []),
    ("S0", "S0", (4, 4), (4, 4), [], []),
]


@pytest.mark.parametrize("source, target, given, made, forward, backward", ALGEBRA)
def test_layout_changes_issue_their_collectives(
    source: str, target: str, given: tuple[int, int], made: tuple[int, int], forward: list[str], backward: list[str]
) -> None:
    """Each change of layout gives the local shape of its target, and its gradient that of its source, with exactly
    the collectives of the layout algebra, all of the full tensor of 8 x 4."""
    layout = TensorParallelLayout(unit_class="Toy", degree=2, sequence="none", modules=())
    recorder = Recorder([], Trace())
    emulation = Emulation(nn.Identity().get_submodule, layout, recorder)
    change = Redistribution(source=Layout.parse(source), target=Layout.parse(target))
    tensor = torch.empty(given, device="meta", requires_grad=True)
    with recorder.forward():
        outputs = [emulation.redistribute(tensor, change)]
    shape = tuple(outputs[0].shape)
    recorder.backward(outputs, [tensor])
    assert recorder.trace is not None
    issued = {phase: [] for phase in ("forward", "backward")}  # type: dict[str, list[str]]
    for op in recorder.trace.operators:
        if op.kind == "collective":
            issued[op.phase].append(op.name)
            assert op.bytes_read == (4 * 4 * 4 if op.name == "all_to_all" else 8 * 4 * 4)

    assert shape == made
    assert (issued["forward"], issued["backward"]) == (forward, backward)


def test_a_dim_that_does_not_divide_is_refused(graph: ModelGraph) -> None:
    """A layout that would cut a dim into unequal parts is an error that says which."""
    shard = Redistribution(source=Layout.parse("S0"), target=Layout.parse("S0"))
    part = ModuleLayout(module="self_attn.q_proj", parameters={"weight": shard})
    layout = TensorParallelLayout(unit_class="LlamaDecoderLayer", degree=5, sequence="none", modules=(part,))
    with pytest.raises(ModelError, match=r"dim 0 of a tensor of shape \(32, 32\) in LlamaDecoderLayer"):
        graph.source.facts("LlamaDecoderLayer", layout, MICROBATCH)
