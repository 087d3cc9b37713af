"""Experts are found by structure and calls, and a block is traced as one of the ranks that share them."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import galv
from galv.errors import UsageError
from galv.planner.capture import capture
from galv.planner.capture.experts import find_experts
from galv.planner.capture.sample import ModuleCall
from galv.planner.capture.source import resolve_model
from galv.planner.graph import Exclusion, ModelGraph
from galv.planner.plan import ExpertLayout, ExpertsModule, ModuleLayout, TensorParallelLayout
from tests.models.experts import WIDTH, Bank, Block, Mixture
from tests.plans import MODELS, SEQ_LEN, random_batch


@lru_cache
def graph_of(name: str) -> ModelGraph:
    """The graph of a small model."""
    build = Mixture if name == "mixture" else MODELS[name]
    return capture(resolve_model(build(), random_batch(2, 0), seq_len=SEQ_LEN), precision="fp32", device_kind="cpu")


def layout_of(block: nn.Module) -> ExpertLayout | Exclusion:
    """What is found in a block of the activation's width."""
    call = ModuleCall("", (torch.empty(2, 8, WIDTH, device="meta"),), {}, "0")
    return find_experts("Block", block.to("meta"), call, "cpu")


def test_found_in_mixtral() -> None:
    """The class knows how many experts it has, which parameters are theirs, and how they are called."""
    graph = graph_of("mixtral")
    block = graph.classes["MixtralDecoderLayer"]
    assert block.experts == 4
    assert {p.name for p in block.parameters if p.is_expert} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    found = graph.source.expert_layout("MixtralDecoderLayer")
    assert isinstance(found, ExpertLayout)
    assert found.modules[0].counts == ("num_experts",)
    assert [graph.classes[name].experts for name in ("embedding", "head")] == [0, 0]


def test_found_without_a_name() -> None:
    """Keyword arguments in any order, an attribute that only equals the number of experts, biases of two dims."""
    found = graph_of("mixture").source.expert_layout("Block")
    assert found == ExpertLayout(
        unit_class="Block",
        num_experts=4,
        modules=(
            ExpertsModule(
                module="bank",
                parameters=("first", "bias", "second"),
                tokens="0",
                choices="picks",
                weights="share",
                counts=("size",),
            ),
        ),
    )


class _Scaled(Bank):
    """A bank with a parameter of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.scale = nn.Parameter(torch.ones(WIDTH))


class _Fixed(Bank):
    """A bank that says its size in numbers."""

    def forward(self, x: Tensor, *, share: Tensor, picks: Tensor) -> Tensor:
        """As the bank, of four."""
        return x * self.first.sum((1, 2)).view(4)[picks].mul(share).sum(1, keepdim=True)


class _Swapped(Block):
    """A block that gives its bank no choices."""

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        return x + torch.einsum("bsw,ewh->bsw", x, self.bank.first)


class _Sequences(nn.Module):
    """A convolution has weights of three dims and no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        return self.mix(x)


def _with(bank: nn.Module) -> nn.Module:
    block = Block(4)
    block.bank = bank
    return block


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), "holds no experts"),
        (_Sequences, "is not called with"),
        (lambda: _Swapped(4), "bank never runs"),
        (lambda: _with(_Scaled(4)), "bank.scale of (16,) belongs to none of the 4 experts alone"),
        (lambda: _with(_Fixed(4)), "does not run on a part of its experts"),
    ],
)
def test_why_there_are_none(block: type[nn.Module], reason: str) -> None:
    """Each exclusion says what is missing."""
    found = layout_of(block())
    assert isinstance(found, Exclusion)
    assert reason in found.reason


def test_exclusions() -> None:
    """Degrees must divide the experts."""
    source = graph_of("mixtral").source
    assert source.expert_exclusion("MixtralDecoderLayer", 4) is None
    assert source.expert_exclusion("MixtralDecoderLayer", 2, tp=2) is None
    refused = source.expert_exclusion("MixtralDecoderLayer", 3)
    assert refused is not None and "4 experts" in refused.reason
    assert source.expert_exclusion("embedding", 2) is not None


def test_a_tensor_axis_that_cuts_between_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares them out itself, so there is nothing to share besides."""
    source = graph_of("mixture").source
    cut = {"source": "S0", "target": "S0"}
    bank = ModuleLayout.model_validate({"module": "bank", "parameters": {"first": cut}})
    layout = TensorParallelLayout(unit_class="Block", degree=2, sequence="none", modules=(bank,))
    assert source.expert_exclusion("Block", 2, tp=2) is None
    monkeypatch.setattr(source, "layout", lambda *_: layout)
    refused = source.expert_exclusion("Block", 2, tp=2)
    assert refused is not None and "shares out the experts" in refused.reason


@pytest.mark.parametrize("tp", [1, 2])
def test_facts_of_a_part(tp: int) -> None:
    """Even routing leaves the work as it is, on half of the weights; rows are exchanged twice in each direction."""
    source = graph_of("mixtral").source
    name = "MixtralDecoderLayer"
    layout = None if tp == 1 else source.layout(name, tp, "none")
    assert layout is None or isinstance(layout, TensorParallelLayout)
    before = [id(p) for p in source.sample(name).modules[0][1].parameters()]
    whole, part = source.facts(name, layout, 3), source.facts(name, layout, 3, ep=2)

    assert part.forward_flops == whole.forward_flops
    assert part.backward_flops == whole.backward_flops
    rows = 3 * SEQ_LEN * 2
    moved = {
        phase: sorted(op.bytes_read for op in part.phase(phase) if op.axis == "expert")
        for phase in ("forward", "backward")
    }
    large, weights, counts = rows * 32 * 4, rows * 4, 4 * 8
    assert moved == {"forward": [counts, weights, large, large], "backward": [weights, large, large]}
    assert not [op for op in whole.operators if op.axis == "expert"]
    read = [sum(op.bytes_read for op in f.operators if "grouped" in op.name) for f in (whole, part)]
    assert read[1] < read[0]
    assert [id(p) for p in source.sample(name).modules[0][1].parameters()] == before
    assert source.facts(name, layout, 3) == whole


def test_a_layout_by_hand_needs_experts() -> None:
    """To ask for shared experts where there are none is refused, with the reason of the blocks."""
    with pytest.raises(UsageError, match="ep 2: LlamaDecoderLayer holds no experts"):
        galv.estimate(graph_of("llama"), cluster="cpu:4x1", seq_len=SEQ_LEN, global_batch=8, precision="fp32", ep=2)
