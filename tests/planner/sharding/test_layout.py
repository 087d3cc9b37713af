"""What a layout says: where things change, what is stored how, and why there may be none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galv.planner.capture.sample import ModuleCall, UnitSample
from galv.planner.graph import Exclusion
from galv.planner.plan import LocalArgument, Redistribution, SequenceMode, TensorParallelLayout
from galv.planner.sharding import find_layout
from tests.planner.sharding.units import block, forward, model, on_meta, recorded


def _found(unit: UnitSample, degree: int, sequence: SequenceMode = "none") -> TensorParallelLayout:
    layout = find_layout(unit, degree, sequence)
    assert isinstance(layout, TensorParallelLayout), layout
    return layout


def _reason(unit: UnitSample, degree: int, sequence: SequenceMode = "none") -> str:
    excluded = find_layout(unit, degree, sequence)
    assert isinstance(excluded, Exclusion), excluded
    return excluded.reason


def _text(changes: Iterable[tuple[str, Redistribution]]) -> dict[str, str]:
    return {name: f"{change.source}->{change.target}" for name, change in changes}


def _parameters(layout: TensorParallelLayout) -> dict[str, str]:
    named = (
        (f"{m.module}.{name}".lstrip("."), change) for m in layout.modules for name, change in m.parameters.items()
    )
    return _text(named)


def _borders(layout: TensorParallelLayout) -> dict[str, str]:
    sides = [(m.module, side) for m in layout.modules for side in ((">", m.inputs), ("<", m.outputs))]
    return _text((f"{module}{sign}{name}", change) for module, (sign, side) in sides for name, change in side.items())


def _unit(module: nn.Module, *shape: int) -> UnitSample:
    call = ModuleCall("", (torch.empty(shape, device="meta"),), {}, "0")
    return UnitSample("Unit", (("unit", module.to("meta")),), (call,))


# ----------------------------------------------------------------------------------------------- blocks


def test_a_llama_block_is_laid_out_as_by_hand() -> None:
    """Columns, then rows; one change where attention and network begin, named by keyword where they are called so."""
    layout = _found(on_meta(block("llama")), 2)

    assert _parameters(layout) == {
        **dict.fromkeys((f"self_attn.{name}_proj.weight" for name in "qkv"), "S0->S0"),
        **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "S0->S0"),
        **dict.fromkeys(("self_attn.o_proj.weight", "mlp.down_proj.weight"), "S1->S1"),
        **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), "R->R"),
    }
    assert _borders(layout) == {
        "self_attn>hidden_states": "R->R+",
        "self_attn<0": "P->R",
        "mlp>0": "R->R+",
        "mlp<0": "P->R",
    }
    assert layout.local_arguments == ()


def test_sequence_sharding_gathers_and_scatters_where_it_would_copy_and_sum() -> None:
    """With sequence "megatron" the same borders go between S1 and the region, and norms see a share of the tokens."""
    layout = _found(on_meta(block("llama")), 2, "megatron")

    assert _borders(layout) == {
        "self_attn>hidden_states": "S1->R+",
        "self_attn<0": "P->S1",
        "mlp>0": "S1->R+",
        "mlp<0": "P->S1",
    }
    assert _parameters(layout)["input_layernorm.weight"] == "R->R+"


def test_a_fused_projection_is_cut_chunk_by_chunk() -> None:
    """GPT-2's query, key and value come in one matrix; sizes in its forward shrink; its closing bias is added once."""
    layout = _found(on_meta(block("gpt2")), 4)

    parameters = _parameters(layout)
    assert parameters["attn.c_attn.weight"] == "S1x3->S1x3"
    assert parameters["attn.c_attn.bias"] == "S0x3->S0x3"
    assert parameters["attn.c_proj.weight"] == "S0->S0"
    assert parameters["attn.c_proj.bias"] == "R->P"
    assert layout.local_arguments == (
        LocalArgument(module="attn.c_attn", function="view", occurrence=1, arguments={2: 48}),
        LocalArgument(module="attn", function="split", occurrence=0, arguments={0: 16}),
        LocalArgument(module="mlp.c_fc", function="view", occurrence=1, arguments={2: 64}),
    )


def test_norms_on_heads_see_their_own_heads() -> None:
    """Qwen3 normalizes every head with one weight, of whose gradient each rank has a share."""
    parameters = _parameters(_found(on_meta(block("qwen3")), 2))

    assert parameters["self_attn.q_norm.weight"] == parameters["self_attn.k_norm.weight"] == "R->R+"


def test_bounds_written_as_constants_shrink() -> None:
    """Phi-3 takes query, key and value out of one projection by constant bounds."""
    layout = _found(on_meta(block("phi3")), 2)

    assert _parameters(layout)["self_attn.qkv_proj.weight"] == "S0x3->S0x3"
    bounds = [a.arguments for a in layout.local_arguments if a.function == "__getitem__"]
    assert bounds == [{0: 32}, {0: 32, 1: 64}, {0: 64}]


def test_a_part_is_divided_when_another_cannot_be() -> None:
    """With 4 key heads for 8 ranks attention's heads stay together; the network is divided all the same."""
    layout = _found(on_meta(block("llama")), 8)

    parameters = _parameters(layout)
    assert parameters["mlp.gate_proj.weight"] == "S0->S0"
    assert parameters["mlp.down_proj.weight"] == "S1->S1"
    assert "self_attn>hidden_states" not in _borders(layout) or _borders(layout)["self_attn<0"] != "P->R"


# ----------------------------------------------------------------------------------------------- embedding and head


def _around(name: str, modules: tuple[str, ...], *, tied: str = "", **changes: Any) -> UnitSample:
    unit = recorded(model(name, **changes), modules, repeated=False, run=forward)
    return on_meta(unit, frozenset({tied} if tied else ()))


@pytest.mark.parametrize("sequence", ["none", "megatron"])
def test_embedding_and_head_are_whole_at_their_borders(sequence: SequenceMode) -> None:
    """The table is cut along the hidden dim, the head along the vocabulary; both gather what they give."""
    embedding = _found(_around("llama", ("model.embed_tokens",)), 2, sequence)
    head = _found(_around("llama", ("model.norm", "lm_head")), 2, sequence)

    assert (_parameters(embedding), _borders(embedding)) == ({"weight": "S1->S1"}, {"<0": "S2->R"})
    assert _parameters(head) == {"0.weight": "R->R", "1.weight": "S0->S0"}
    assert _borders(head) == {"1>0": "R->R+", "1<0": "S2->R"}


def test_a_vocabulary_that_does_not_divide_leaves_the_head_whole() -> None:
    """That is a layout, not an exclusion."""
    head = _found(_around("gpt2", ("transformer.ln_f", "lm_head"), vocab_size=97, tie_word_embeddings=False), 2)

    assert set(_parameters(head).values()) == {"R->R"}
    assert _borders(head) == {}


@pytest.mark.parametrize(("vocabulary", "degree", "stored"), [(96, 2, "S0"), (96, 4, "S0"), (97, 2, "R"), (97, 4, "R")])
def test_a_tied_table_is_stored_alike_in_both_units(vocabulary: int, degree: int, stored: str) -> None:
    """Embedding and head agree on how the one tensor is kept, whatever either of them does with it."""
    changes = {"vocab_size": vocabulary, "tie_word_embeddings": True}
    embedding = _around("gpt2", ("transformer.wte", "transformer.wpe"), tied="0.weight", **changes)
    head = _around("gpt2", ("transformer.ln_f", "lm_head"), tied="1.weight", **changes)

    uses = (_parameters(_found(embedding, degree))["0.weight"], _parameters(_found(head, degree))["1.weight"])
    assert {use.partition("->")[0] for use in uses} == {stored}


def test_modules_of_one_unit_that_share_a_parameter_store_it_alike() -> None:
    """The same holds without being told, when both modules belong to one unit."""
    first, second = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
    second.weight = first.weight
    tokens, hidden = torch.zeros(2, 8, dtype=torch.long, device="meta"), torch.empty(2, 8, 64, device="meta")
    calls = (ModuleCall("0", (tokens,), {}, "0"), ModuleCall("1", (hidden,), {}, "0"))
    unit = UnitSample("Unit", (("first", first.to("meta")), ("second", second.to("meta"))), calls, repeated=False)
    second.weight = first.weight  # going to the meta device has parted them

    parameters = _parameters(_found(unit, 2))
    assert parameters["0.weight"].startswith("S0->")
    assert parameters["1.weight"] == "S0->S0"


# ----------------------------------------------------------------------------------------------- why not


def test_sizes_that_do_not_divide_are_named() -> None:
    """The reason tells heads and widths that the degree would have to divide, and where they are."""
    reason = _reason(on_meta(block("llama")), 3)

    assert "degree 3" in reason
    assert "8 (of 8 x 8, view of self_attn)" in reason
    assert "128 (in mlp.gate_proj.weight of (128, 64))" in reason


def test_a_sequence_that_does_not_divide_is_named() -> None:
    """The reason tells the sequence's length and the degree."""
    assert "17" in _reason(_unit(nn.Linear(8, 8), 2, 17, 8), 2, "megatron")
    assert "(2, 8, 4, 4)" in _reason(_unit(nn.Conv2d(8, 8, 1), 2, 8, 4, 4), 2, "megatron")


class ReadsAnother(nn.Module):
    """Uses the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight


class WritesIntoAView(nn.Module):
    """Changes a tensor through a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y[:, 0] = 0.0
        return y


class Branches(nn.Module):
    """Cannot be followed without values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (ReadsAnother(), "inner.weight is read"),
        (WritesIntoAView(), "writes into a view"),
        (Branches(), "cannot be traced"),
    ],
)
def test_what_cannot_be_followed_is_excluded_with_the_reason(module: nn.Module, words: str) -> None:
    """Nothing is guessed where the graph would not tell the truth."""
    assert words in _reason(_unit(module, 2, 8, 8), 2)


# ----------------------------------------------------------------------------------------------- constants


class Constants(nn.Module):
    """A layer whose output is reshaped by `reshape`, which knows sizes by heart."""

    def __init__(self, reshape: Any) -> None:
        super().__init__()
        self.up, self.down, self.reshape = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False), reshape

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.reshape(self.up(x)))


def test_a_constant_number_of_heads_shrinks() -> None:
    """A size that a view leaves open must not take what the constant ones leave over."""
    layout = _found(_unit(Constants(lambda y: y.view(2, 4, 6, -1).tanh().flatten(2)), 2, 4, 8), 2)

    assert layout.local_arguments == (LocalArgument(module="", function="view", occurrence=0, arguments={2: 3}),)


def test_a_part_of_the_right_shape_from_the_wrong_place_is_noticed() -> None:
    """On a shard of 12, [8:16] has 4 elements as it should, but they are not the second of three parts."""
    layout = _found(_unit(Constants(lambda y: torch.cat([y[..., 8:16], y[..., :8], y[..., 16:]], -1)), 2, 4, 8), 2)

    assert _parameters(layout)["up.weight"] == "S0x3->S0x3"
    changes = [argument.arguments for argument in layout.local_arguments]
    assert changes == [{0: 4, 1: 8}, {0: 4}, {0: 8}]


def test_a_constant_with_the_number_of_samples_in_it_is_not_trusted() -> None:
    """The layout serves every number of samples, so a product with this one's stays out of it."""

    def heads_first(y: Tensor) -> Tensor:
        heads = y.view(2, 4, 6, 4).transpose(1, 2).reshape(12, 4, 4).tanh()
        return heads.view(2, 6, 4, 4).transpose(1, 2).flatten(2)

    layout = _found(_unit(Constants(heads_first), 2, 4, 8), 2)

    assert "reshape" not in {argument.function for argument in layout.local_arguments}
    assert _borders(layout)["up<0"].startswith("S2->R")


def test_a_scale_that_follows_a_shard_is_noticed() -> None:
    """A factor computed from a local size differs from the whole one's, so that width is not cut."""
    layout = _found(_unit(Constants(lambda y: y * (1.0 / y.shape[-1])), 2, 4, 8), 2)

    assert _borders(layout)["up<0"].startswith("S2->R")
