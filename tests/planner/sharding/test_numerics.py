"""Units run under the layouts found for them: outputs and every gradient are those of the whole unit."""

from __future__ import annotations

from typing import Any

import pytest

from galv.planner.plan import SequenceMode, TensorParallelLayout
from galv.planner.sharding import find_layout
from tests.planner.sharding.ranks import Group, check_equal
from tests.planner.sharding.units import BLOCKS, block, forward, model, on_meta, recorded

TOLERANCE = 1e-6
"""The RMS norms of Hugging Face compute in single precision, whatever they are given."""


def _found(unit: Any, degree: int, sequence: SequenceMode = "none", tied: frozenset[str] = frozenset()) -> Any:
    layout = find_layout(on_meta(unit, tied), degree, sequence)
    assert isinstance(layout, TensorParallelLayout)
    return layout


def _collectives(group: Group) -> tuple[list[str], list[str]]:
    return [x for x in group.forward if x], [x for x in group.backward if x]


@pytest.mark.parametrize("sequence", ["none", "megatron"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_the_same(name: str, degree: int, sequence: SequenceMode) -> None:
    """A block on several ranks gives the outputs, input gradients and parameter gradients of the whole block."""
    unit = block(name)

    check_equal(unit, unit.calls[0], _found(unit, degree, sequence), tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bert", "phi3"])
def test_a_block_communicates_as_megatron_lm_does(name: str) -> None:
    """Two all-reduces each way; with sequence sharding two gathers, two reduce-scatters, and the norms' gradients."""
    unit = block(name)

    group = check_equal(unit, unit.calls[0], _found(unit, 2), tolerance=TOLERANCE)
    assert _collectives(group) == (["all_reduce"] * 2, ["all_reduce"] * 2)
    layout = _found(unit, 2, "megatron")
    norms = [p for m in layout.modules for p in m.parameters.values() if (str(p.source), str(p.target)) == ("R", "R+")]
    there, back = _collectives(check_equal(unit, unit.calls[0], layout, tolerance=TOLERANCE))
    assert there == ["all_gather", "reduce_scatter"] * 2
    assert [x for x in back if x != "all_reduce"] == ["all_gather", "reduce_scatter"] * 2
    assert back.count("all_reduce") == len(norms) > 0


@pytest.mark.parametrize("sequence", ["none", "megatron"])
@pytest.mark.parametrize(
    ("name", "changes", "degree"),
    [
        ("llama", {"num_key_value_heads": 1}, 4),
        ("llama", {"num_key_value_heads": 2}, 4),
        ("llama", {"attention_bias": True, "mlp_bias": True, "attn_implementation": "eager"}, 2),
        ("gpt2", {"n_head": 2}, 4),
        ("gpt2", {"attn_implementation": "eager"}, 4),
        ("phi3", {"num_key_value_heads": 4}, 2),
    ],
)
def test_what_cannot_be_divided_by_heads_is_right_too(
    name: str, changes: dict[str, Any], degree: int, sequence: SequenceMode
) -> None:
    """Attention stays whole, or is divided in another way, where heads do not divide; written out, it is like fused."""
    unit = block(name, **changes)

    check_equal(unit, unit.calls[0], _found(unit, degree, sequence), tolerance=TOLERANCE)


AROUND: list[tuple[str, dict[str, Any], tuple[str, ...], frozenset[str]]] = [
    ("llama", {}, ("model.embed_tokens",), frozenset()),
    ("llama", {}, ("model.norm", "lm_head"), frozenset()),
    ("llama", {"tie_word_embeddings": True}, ("model.embed_tokens",), frozenset({"weight"})),
    ("llama", {"tie_word_embeddings": True}, ("model.norm", "lm_head"), frozenset({"1.weight"})),
    ("gpt2", {"vocab_size": 97}, ("transformer.wte", "transformer.wpe"), frozenset({"0.weight"})),
    ("gpt2", {"vocab_size": 97}, ("transformer.ln_f", "lm_head"), frozenset({"1.weight"})),
    ("bert", {}, ("bert.embeddings",), frozenset({"word_embeddings.weight"})),
    ("bert", {}, ("cls",), frozenset({"predictions.decoder.weight"})),
]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(("name", "changes", "modules", "tied"), AROUND)
def test_embedding_and_head_compute_the_same(
    name: str, changes: dict[str, Any], modules: tuple[str, ...], tied: frozenset[str], degree: int
) -> None:
    """Embeddings and heads, tied or not, with a vocabulary that divides or not, give the whole one's results."""
    unit = recorded(model(name, **changes), modules, repeated=False, run=forward)
    layout = _found(unit, degree, "megatron", tied)

    for call in unit.calls:
        check_equal(unit, call, layout, tolerance=TOLERANCE)
