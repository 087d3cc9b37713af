"""The traced glue computes what the model computes, and says what it cannot follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from galv.errors import ModelError
from galv.planner.capture.glue import trace_glue

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 3, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4}

MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), "model.layers"),
    "llama-tied": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "model.layers",
    ),
    "qwen3": (lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)), "model.layers"),
    "mistral-window": (
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8)),
        "model.layers",
    ),
    "gemma2": (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8)), "model.layers"),
    "gpt2-tied": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT)),
        "transformer.h",
    ),
    "opt": (
        lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, word_embed_proj_dim=32, dropout=0.0)),
        "model.decoder.layers",
    ),
}


def leaves(model: nn.Module, blocks: str) -> list[str]:
    """The children of `blocks` and the smallest modules that hold the other parameters."""
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name.rpartition(".")[0] == blocks or any(True for _ in module.parameters(recurse=False)):
            found.append(name)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}".lstrip("."), child)

    visit("", model)
    return found


def build(name: str) -> tuple[nn.Module, list[str], dict[str, Tensor]]:
    """A tiny model with weights of seed 0, its leaves, and a batch in which some labels do not count."""
    torch.manual_seed(0)
    make, blocks = MODELS[name]
    model = make()
    tokens = torch.randint(0, 64, (2, 16))
    labels = tokens.clone()
    labels[0, 3:9] = -100
    return model, leaves(model, blocks), {"input_ids": tokens, "labels": labels}


def on_cpu(glue: fx.GraphModule) -> fx.GraphModule:
    """The glue with factories that ask for the CPU."""
    for node in glue.graph.nodes:
        if node.kwargs.get("device") == torch.device("meta"):
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    glue.recompile()
    return glue


def called(glue: fx.GraphModule) -> list[str]:
    """The modules that the glue calls, in order."""
    return [str(node.target) for node in glue.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", MODELS)
def test_glue_is_the_model(name: str) -> None:
    """Loss and every gradient of the glue are bit-equal to the model's, and each leaf is called once in its order."""
    model, names, inputs = build(name)
    glue = on_cpu(trace_glue(model, names, inputs))
    model.train()
    expected = model(**inputs).loss
    expected.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()

    loss = glue(**inputs)
    loss.backward()

    assert torch.equal(loss, expected)
    assert [key for key, p in model.named_parameters() if not torch.equal(p.grad, gradients[key])] == []
    assert sorted(called(glue)) == sorted(names)
    assert [node.name for node in glue.graph.nodes if node.op == "placeholder"] == ["input_ids", "labels"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2-tied", "opt"])
def test_fused_causal_attention_stays(name: str) -> None:
    """Full sequences give blocks no explicit mask, as in eager training, so fused causal kernels run."""
    model, names, inputs = build(name)
    shapes = [
        value.meta["val"].shape[-2:]
        for node in trace_glue(model, names, inputs).graph.nodes
        if node.op == "call_module"
        for value in node.all_input_nodes
    ]
    assert torch.Size([16, 16]) not in shapes


def test_buffers_keep_their_names() -> None:
    """A buffer between the leaves is a get_attr node under its own name."""
    model, names, inputs = build("llama")
    glue = trace_glue(model, names, inputs)
    assert {node.target for node in glue.graph.nodes if node.op == "get_attr"} == {"model.rotary_emb.inv_freq"}


def test_the_model_stays_as_it_was() -> None:
    """Tracing leaves mode, forwards, cache setting, parameters and random state of the model alone."""
    model, names, inputs = build("llama")
    model.eval()
    before, state = {key: id(p) for key, p in model.named_parameters()}, torch.get_rng_state()
    trace_glue(model, names, inputs)
    assert {key: id(p) for key, p in model.named_parameters()} == before
    assert not any(module.training or "forward" in vars(module) for module in model.modules())
    assert model.config.use_cache
    assert torch.equal(torch.get_rng_state(), state)


def test_depth_costs_little() -> None:
    """126 blocks of a 405-billion-parameter model on the meta device are traced in seconds."""
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        inputs = {name: torch.zeros(1, 8192, dtype=torch.long) for name in ("input_ids", "labels")}
    start = time.perf_counter()
    glue = trace_glue(model, leaves(model, "model.layers"), inputs, dtype=torch.bfloat16)
    assert time.perf_counter() - start < 10
    assert len(called(glue)) == 126 + 3


def test_dtype_is_what_parameters_compute_in() -> None:
    """With bf16 parameters hidden states are bf16, and the loss is fp32 as the model's own cast says."""
    model, names, inputs = build("llama")
    nodes = {node.name: node for node in trace_glue(model, names, inputs, dtype=torch.bfloat16).graph.nodes}
    assert nodes["model_layers_1"].meta["val"].dtype == torch.bfloat16
    assert nodes["_log_softmax_default"].meta["val"].dtype == torch.float32


# ----------------------------------------------------------------------------------------------- plain modules


class Plain(nn.Module):
    """A plain model with a root buffer, Python constants, a gate without gradient, and a branch on constants."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.offset = torch.arange(4.0)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x) * self.scale + self.offset + torch.tensor(3.0, device=x.device)
        if torch.arange(3, device=x.device).sum() == 3:
            hidden = hidden + x.new_tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            gate = hidden.sigmoid()
        return {"loss": (self.last(hidden * gate) + hidden.detach()).mean()}


def test_plain_modules_are_followed() -> None:
    """Buffers, constants, branches on constants and regions without gradient all come out as in the model."""
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 4)
    glue = on_cpu(trace_glue(model, ["first", "last"], {"x": x}))
    expected = model(x)["loss"]
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = glue(x=x)
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


class Structured(nn.Module):
    """A leaf that takes and returns nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, pair: tuple[Tensor, Any], *, options: dict[str, Any]) -> dict[str, Any]:
        return {"sum": self.weight * pair[0] + options["bias"], "rest": [pair[0], None], "kept": pair[1]}


class Around(nn.Module):
    """Calls a `Structured` twice through nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Structured()

    def forward(self, x: Tensor) -> Tensor:
        first = self.leaf((x, None), options={"bias": x + 1})
        assert first["kept"] is None
        return self.leaf((first["sum"], "text"), options={"bias": first["rest"][0]})["sum"]


def test_arguments_keep_their_structure() -> None:
    """Tuples, dicts, None and strings reach a leaf as the model gives them, and come back in the leaf's structure."""
    model, x = Around(), torch.randn(2, 4)
    glue = trace_glue(model, ["leaf"], {"x": x})
    assert torch.equal(glue(x=x), model(x))
    assert called(glue) == ["leaf", "leaf"]


# ----------------------------------------------------------------------------------------------- refusals


class Branching(nn.Module):
    """Branches on its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(x) if x.sum() > 0 else x.mean()


class Stray(nn.Module):
    """Uses a parameter outside of its leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.bias = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.leaf(x) + self.bias).mean()


class Passing(nn.Module):
    """Gives its leaf an object."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(x, cache=object())


@pytest.mark.parametrize(
    "model, message",
    [
        (Branching(), "branches on values computed from the input 'x'"),
        (Stray(), "parameter 'bias' is used outside of the modules that hold parameters"),
        (Passing(), "an argument of type object is passed between modules"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_followed_is_named(model: nn.Module, message: str) -> None:
    """The message says what stopped the trace, and the module and line where."""
    with pytest.raises(ModelError, match=message) as caught:
        trace_glue(model, ["leaf"], {"x": torch.randn(2, 4)})
    assert f"({type(model).__name__}), {__file__}:" in str(caught.value)


def test_an_output_without_loss_is_refused() -> None:
    """A model that returns no tensor and no loss is told what it should return."""
    model, names, inputs = build("llama")
    with pytest.raises(ModelError, match="holds no loss"):
        trace_glue(model, names, {"input_ids": inputs["input_ids"]})
