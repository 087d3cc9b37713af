"""From a model to units and unit classes: real decoders, plain modules, and models that are no chain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.planner.capture import capture
from galv.planner.capture.fingerprint import fingerprint_as
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph, UnitRef

SEQ_LEN = 32
Config = Callable[..., str]


def captured(model: Any, example: Any = None, **settings: Any) -> ModelGraph:
    """The graph of a model, traced for a CPU in fp32."""
    return capture(resolve_model(model, example, **settings), precision="fp32", device_kind="cpu")


DECODERS = {
    "llama": (("model.embed_tokens",), "model.layers", "LlamaDecoderLayer", ("model.norm", "lm_head")),
    "llama-tied": (("model.embed_tokens",), "model.layers", "LlamaDecoderLayer", ("model.norm", "lm_head")),
    "gpt2": (("transformer.wte", "transformer.wpe"), "transformer.h", "GPT2Block", ("transformer.ln_f", "lm_head")),
    "qwen3": (("model.embed_tokens",), "model.layers", "Qwen3DecoderLayer", ("model.norm", "lm_head")),
    "mistral": (("model.embed_tokens",), "model.layers", "MistralDecoderLayer", ("model.norm", "lm_head")),
    "gpt-neox": (
        ("gpt_neox.embed_in",),
        "gpt_neox.layers",
        "GPTNeoXLayer",
        ("gpt_neox.final_layer_norm", "lm_head"),
    ),
    "opt": (
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder.layers",
        "OPTDecoderLayer",
        ("model.decoder.final_layer_norm", "lm_head"),
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_embedding_blocks_and_head(config: Config, name: str) -> None:
    """A decoder of transformers is an embedding, its layers as one class, and a head, whatever its modules' names."""
    embedding, blocks, block_class, head = DECODERS[name]
    graph = captured(config(name), seq_len=SEQ_LEN)
    layers = tuple(UnitRef(f"{blocks}.{i}", block_class, (f"{blocks}.{i}",)) for i in range(3))
    assert graph.units == (
        UnitRef("embedding", "embedding", embedding),
        *layers,
        UnitRef("head", "head", head),
    )


@pytest.mark.parametrize("name", DECODERS)
def test_units_hold_every_parameter_once(config: Config, name: str) -> None:
    """The parameters of all units together are the model's, with tied ones counted in each unit that holds them."""
    path = config(name)
    graph, model = captured(path, seq_len=SEQ_LEN), resolve_model(path, seq_len=SEQ_LEN).build()
    own = set(model.parameters())
    held = sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False))

    assert graph.num_parameters == sum(parameter.numel() for parameter in own)
    assert sum(n * graph.classes[unit].num_parameters for unit, n in graph.counts.items()) == held


def test_tied_units_are_known(config: Config) -> None:
    """A head that shares the embedding's table is tied to it, by name and by unit."""
    tied, plain = (captured(config(name), seq_len=SEQ_LEN) for name in ("llama-tied", "llama"))
    assert tied.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert tied.tied_units == (frozenset({0, 4}),)
    assert plain.tied == () and plain.tied_units == ()
    assert plain.num_parameters - tied.num_parameters == 96 * 32


def test_layers_that_compute_otherwise_are_other_classes(config: Config) -> None:
    """SmolLM3's layers without rotary positions have equal parameters and arguments, and still a class of their own."""
    graph = captured(config("smollm3"), seq_len=SEQ_LEN)
    assert graph.counts == {"embedding": 1, "SmolLM3DecoderLayer": 2, "SmolLM3DecoderLayer.2": 1, "head": 1}


def test_inputs_are_described(config: Config) -> None:
    """Token ids and labels are int64, bounded by the vocabulary, with samples along dim 0."""
    graph = captured(config("llama"), seq_len=SEQ_LEN)
    assert [spec.name for spec in graph.inputs] == ["input_ids", "labels"]
    assert {(spec.shape, spec.dtype, spec.batch_dim, spec.high) for spec in graph.inputs} == {
        ((graph.num_samples, SEQ_LEN), "int64", 0, 96)
    }


def test_cost_hardly_grows_with_depth(config: Config) -> None:
    """Facts of a model with 64 layers are those of one with 4, found with as many traced operators."""
    shallow, deep = (captured(config("llama", num_hidden_layers=n), seq_len=SEQ_LEN) for n in (4, 64))
    assert deep.counts["LlamaDecoderLayer"] == 64
    for name in shallow.classes:
        assert shallow.source.facts(name, None, 3) == deep.source.facts(name, None, 3)


def test_a_deep_model_is_captured_at_once(config: Config) -> None:
    """A decoder with 126 layers is captured in a few seconds even on a loaded machine."""
    captured(config("llama"), seq_len=SEQ_LEN)
    start = time.process_time()
    graph = captured(config("llama", num_hidden_layers=126), seq_len=SEQ_LEN)
    graph.source.facts("LlamaDecoderLayer", None, 1)
    assert time.process_time() - start < 5


# ----------------------------------------------------------------------------------------------- plain modules


class Regression(nn.Module):
    """A perceptron that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 64), (64, 64), (64, 64), (64, 4)]
        layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x), y)


def pairs(num_samples: int) -> dict[str, Tensor]:
    """Inputs of `Regression`."""
    return {"x": torch.zeros(num_samples, 16), "y": torch.zeros(num_samples, 4)}


def test_a_perceptron_is_a_chain_of_its_layers() -> None:
    """Linear layers in a row are the units; what lies between them, and the loss, counts for the layer before."""
    graph = captured(Regression, pairs)
    names = [[op.name for op in graph.source.facts(c, None, 2).phase("forward")] for c in graph.classes]

    assert graph.counts == {"Linear": 1, "Linear.2": 2, "Linear.3": 1}
    assert [unit.modules for unit in graph.units] == [("net.0",), ("net.2",), ("net.4",), ("net.6",)]
    assert "aten.relu.default" in names[0] and "aten.relu.default" in names[1]
    assert "aten.mse_loss.default" in names[2] and "aten.relu.default" not in names[2]


def test_all_work_of_a_chain_is_counted_once() -> None:
    """The operators of a perceptron's units are those of the same perceptron as a single unit."""
    chain = captured(Regression, pairs)
    whole = captured(lambda: Whole(Regression()), pairs)
    for phase in ("forward", "backward"):
        parts = [
            op.name
            for unit in chain.units
            for op in chain.source.facts(unit.unit_class, None, 2).phase(phase)
            if op.kind != "view"
        ]
        single = [op.name for op in whole.source.facts("model", None, 2).phase(phase) if op.kind != "view"]
        assert sorted(parts) == sorted(single)


class Whole(nn.Module):
    """Hides the structure of a module: its parameters lie in modules that never run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.names = [name.replace(".", "_") for name, _ in inner.named_parameters()]
        for name, parameter in zip(self.names, inner.parameters(), strict=True):
            self.register_parameter(name, nn.Parameter(parameter.detach()))
        self.inner = [inner]

    def forward(self, **inputs: Tensor) -> Any:
        inner = self.inner[0]
        own = {name: getattr(self, name.replace(".", "_")) for name, _ in inner.named_parameters()}
        return torch.func.functional_call(inner, own, kwargs=inputs)


def test_an_output_without_a_loss_is_differentiated_whole() -> None:
    """Where the model returns a tensor, gradients enter there, and every weight gets one."""
    graph = captured(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), torch.zeros(8, 16))
    first, second = (graph.source.facts(name, None, 8) for name in ("part 0", "part 2"))
    assert graph.counts == {"part 0": 1, "part 2": 1}
    assert [op.name for op in first.phase("backward") if op.kind == "matmul"] == ["aten.mm.default"]
    assert [op.name for op in second.phase("backward") if op.kind == "matmul"] == ["aten.mm.default"] * 2
    assert (first.forward_flops, second.forward_flops) == (2 * 8 * 16 * 64, 2 * 8 * 64 * 4)


def test_parallel_branches_are_no_chain() -> None:
    """Repeated modules that all read the same tensor are left together in one part."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    graph = captured(Experts, torch.zeros(4, 8))
    assert [unit.modules for unit in graph.units] == [("first",), tuple(f"experts.{i}" for i in range(4))]


def test_a_block_that_runs_twice_is_no_chain() -> None:
    """Blocks that a forward calls again are left within one unit."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers]:
                x = layer(x)
            return x

    assert captured(Loop, torch.zeros(4, 8)).counts == {"model": 1}


def test_a_residual_around_the_blocks_counts_for_them() -> None:
    """A sum that the model itself makes around each block is part of the block's unit, forward and backward."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
            self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x.mean((2, 3)))

    graph = captured(Residual, torch.zeros(4, 3, 8, 8))
    block = graph.source.facts("Sequential", None, 4)
    assert graph.counts == {"embedding": 1, "Sequential": 3, "head": 1}
    assert [op.name for op in block.phase("forward") if op.kind == "memory"] == ["aten.relu.default", "aten.add.Tensor"]
    assert block.forward_flops == 2 * 4 * 8 * 8 * 8 * 8 * 9


def test_a_persons_model_is_left_alone() -> None:
    """Capturing a module with weights changes neither its weights nor its mode nor its device."""
    model = Regression().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured(model, pairs(8))
    assert not model.training and "forward" not in vars(model.net[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ----------------------------------------------------------------------------------------------- odd ones


class Stray(nn.Module):
    """A parameter beside the blocks, in the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.scale)
        return x


class Unused(nn.Module):
    """A module that the forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class DataDependent(nn.Module):
    """Asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + 1 if x.sum() > 0 else x


def test_a_parameter_beside_the_blocks_belongs_to_the_unit_that_uses_it_first() -> None:
    """A parameter that lies directly in the module that holds the blocks is held by name, and flows to later users."""
    graph = captured(Stray, torch.zeros(4, 8))
    assert graph.units[0] == UnitRef("layers.0", "Linear", ("layers.0",), ("scale",))
    assert graph.counts == {"Linear": 1, "Linear.2": 2}
    assert [p.name for p in graph.classes["Linear"].parameters] == ["weight", "bias", "/scale"]
    assert graph.num_parameters == sum(n * graph.classes[name].num_parameters for name, n in graph.counts.items())
    assert any(edge.producer == 0 and edge.consumers == (1,) and edge.fixed_bytes == 32 for edge in graph.edges)


def test_an_unused_module_is_noted() -> None:
    """A trainable module that the forward never calls is held by some unit, and a note says so."""
    graph = captured(Unused, torch.zeros(4, 8))
    assert "spare" in {name for unit in graph.units for name in unit.modules}
    assert any("never uses spare" in note for note in graph.notes)


def test_models_that_cannot_be_followed_are_refused() -> None:
    """What stands in the way is named: the module, the line, the operator, and how to go on."""
    message = r"forward of DataDependent with x \(2, 8\) failed at .*test_model_graph.py:\d+ calling aten.*data"
    with pytest.raises(ModelError, match=message):
        captured(DataDependent, torch.zeros(4, 8))


def test_a_frozen_module_that_nothing_uses_is_no_obstacle() -> None:
    """A spare module whose parameters are frozen needs no gradient and is kept with the first unit."""
    model = Unused()
    model.spare.requires_grad_(False)
    assert captured(model, torch.zeros(4, 8)).units[0] == UnitRef("embedding", "embedding", ("spare",))


def test_fingerprints_tell_models_apart(config: Config) -> None:
    """Equal models have equal fingerprints; depth, a width or a tie makes another."""
    variants: list[tuple[str, dict[str, int]]] = [
        ("llama", {}),
        ("llama", {"num_hidden_layers": 4}),
        ("llama", {"intermediate_size": 96}),
        ("llama-tied", {}),
        ("llama", {}),
    ]
    prints = [captured(config(name, **changes), seq_len=SEQ_LEN).fingerprint for name, changes in variants]
    assert len(set(prints)) == 4
    assert prints[0] == prints[-1]


def test_a_fingerprint_needs_no_trace(config: Config) -> None:
    """A model has the fingerprint of its graph under the graph's units, and none under units that it has not."""
    path = config("gpt2")
    graph, model = captured(path, seq_len=SEQ_LEN), resolve_model(path, seq_len=SEQ_LEN).build()
    assert fingerprint_as(model, graph.units) == graph.fingerprint
    assert fingerprint_as(Regression(), graph.units) is None
