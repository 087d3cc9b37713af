"""Where a block's sequence is, found on its graph; and why some blocks cannot be cut along it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from galv.planner.capture.sample import ModuleCall, UnitSample
from galv.planner.graph import Exclusion
from galv.planner.plan import ContextMode, SequenceLayout
from galv.planner.sharding import find_sequence_layout
from tests.planner.sharding.units import block, on_meta

MODES: tuple[ContextMode, ...] = ("ulysses", "ring")


def _found(unit: UnitSample, mode: ContextMode = "ring", degree: int = 2, tp: int = 1) -> SequenceLayout:
    layout = find_sequence_layout(unit, mode, degree, tp=tp)
    assert isinstance(layout, SequenceLayout), layout
    return layout


def _reason(unit: UnitSample, mode: ContextMode = "ring", degree: int = 2, tp: int = 1) -> str:
    excluded = find_sequence_layout(unit, mode, degree, tp=tp)
    assert isinstance(excluded, Exclusion), excluded
    return excluded.reason


def _arguments(layout: SequenceLayout) -> dict[str, str]:
    return {name: " ".join(map(str, layouts)) for name, layouts in layout.arguments.items()}


def _unit(module: nn.Module, *shapes: tuple[int, ...]) -> UnitSample:
    tensors = tuple(torch.empty(shape, device="meta") for shape in shapes)
    return UnitSample("Unit", (("unit", module.to("meta")),), (ModuleCall("", tensors, {}, "0"),))


class Attention(nn.Module):
    """Attention over one dim of the activation, written by hand."""

    def __init__(self, width: int = 16, *, first: bool = False, causal: bool = False, keys: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.causal, self.keys = first, causal, keys

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Heads of size 4; the sequence is the first dim if `first`, `other` is a bias, a mask or holds keys."""
        query, key, value = (self._heads(part) for part in self.qkv(x).chunk(3, -1))
        mask = None if self.keys else other
        if self.keys and other is not None:
            key = value = self._heads(other)
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal)
        out = (out.permute(2, 0, 1, 3) if self.first else out.transpose(1, 2)).flatten(2)
        return x + torch.tanh(self.out(out))

    def _heads(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 4))
        return heads.permute(1, 2, 0, 3) if self.first else heads.transpose(1, 2)


# ----------------------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize("mode", MODES)
def test_rotary_tables_are_cut_where_the_block_multiplies_by_them(mode: ContextMode) -> None:
    """Both tables along their dim of positions, the mask is of the whole sequence."""
    layout = _found(on_meta(block("llama")), mode)

    assert _arguments(layout)["position_embeddings"] == "S1 S1"
    assert _arguments(layout)["attention_mask"] == "R"
    assert (layout.output_dim, layout.attention) == (1, ("exchanged",))


@pytest.mark.parametrize("causal", [True, False])
def test_only_causal_rings_are_balanced(causal: bool) -> None:
    """And then the sequence has to have two chunks for each rank."""
    unit = _unit(Attention(causal=causal), (2, 8, 16))

    assert _found(unit, "ring").balanced == causal
    assert not _found(unit, "ulysses").balanced
    if causal:
        assert "of 8 cannot be divided into 16 chunks, two a rank" in _reason(unit, "ring", 8)
    else:
        assert _found(unit, "ring", 8).degree == 8


def test_sizes_that_agree_do_not_mislead() -> None:
    """Samples, sequence, heads and width are all 16: the sequence is where queries come from."""
    for first in (False, True):
        layout = _found(_unit(Attention(first=first), (16, 16, 16)))
        assert _arguments(layout) == {"0": f"S{int(not first)}"}
        assert layout.output_dim == int(not first)


def test_keys_from_elsewhere_stay_whole() -> None:
    """Attention to what every rank has whole is local; each rank sees a summand of the gradient of that."""
    module = Attention(keys=True)
    tensors = (torch.empty(2, 8, 16, device="meta"), torch.empty(2, 6, 16, device="meta", requires_grad=True))
    unit = UnitSample("Unit", (("unit", module.to("meta")),), (ModuleCall("", tensors, {}, "0"),))
    layout = _found(unit)

    assert _arguments(layout) == {"0": "S1", "1": "R+"}
    assert layout.attention == ("local",)


# ----------------------------------------------------------------------------------------------- why not


class Mixing(nn.Module):
    """A block with one operator that looks along the sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.kind = Attention(), kind
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The operator, then attention."""
        if self.kind == "conv1d":
            x = x + self.convolution(x.mT).mT
        elif self.kind == "mean":
            x = x * x.mean(1, keepdim=True)
        elif self.kind == "cumsum":
            x = x + x.cumsum(1)
        elif self.kind == "arange":
            x = x + torch.arange(x.shape[1], device=x.device).unsqueeze(-1)
        elif self.kind == "softmax":
            x = x + (x @ x.mT).softmax(-1) @ x
        elif self.kind == "sum":
            x = x * x.sum(1, keepdim=True)
        return self.attention(x)


@pytest.mark.parametrize(
    ("kind", "blamed"),
    [("conv1d", "conv1d"), ("mean", "mean"), ("cumsum", "cumsum"), ("arange", "add"), ("softmax", "matmul")],
)
def test_what_mixes_the_sequence_is_named(kind: str, blamed: str) -> None:
    """The operator, with its module; attention that is written out, too."""
    reason = _reason(_unit(Mixing(kind), (2, 8, 16)))

    assert reason.startswith(f"{blamed} in ")
    assert "mixes the sequence" in reason
    assert ("scaled_dot_product_attention" in reason) == (blamed == "matmul")


def test_a_sum_over_the_sequence_is_no_part_of_one() -> None:
    """A partial sum would have to be added up between ranks."""
    assert "mixes the sequence" in _reason(_unit(Mixing("sum"), (2, 8, 16)))


def test_a_mask_that_is_trained_is_refused() -> None:
    """T5 adds its relative positions to the scores."""
    assert "without a mask that is trained" in _reason(on_meta(block("t5 encoder")))


@pytest.mark.parametrize("mode", MODES)
def test_sequences_that_do_not_divide(mode: ContextMode) -> None:
    """A vision transformer has one token more than patches."""
    assert "the sequence of 17 cannot be divided into 2" in _reason(_unit(Attention(), (2, 17, 16)), mode)


def test_heads_that_do_not_divide() -> None:
    """Ulysses cuts what the tensor axis has left of the heads; rings do not care."""
    unit = _unit(Attention(), (2, 8, 16))

    assert "multiple of 8 heads, and attention has 4" in _reason(unit, "ulysses", 4, tp=2)
    assert _found(unit, "ulysses", 2, tp=2).degree == 2
    assert _found(unit, "ring", 4, tp=2).degree == 4


def test_a_size_written_into_the_model() -> None:
    """A block that says how long its sequence is cannot run on a part of one."""

    class Fixed(Attention):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(x.reshape(2, 8, 16))

    assert "cannot run reshape" in _reason(_unit(Fixed(), (2, 8, 16)))


def test_only_blocks_are_cut() -> None:
    """Not what stands around them."""
    module = Attention().to("meta")
    call = ModuleCall("", (torch.empty(2, 8, 16, device="meta"),), {}, "0")

    assert "repeated blocks" in _reason(UnitSample("head", (("unit", module),), (call,), repeated=False))
