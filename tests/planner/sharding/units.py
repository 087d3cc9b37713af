"""Units of small Hugging Face models with real double-precision weights, and the calls that they receive."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from galv.planner.capture.sample import ModuleCall, UnitSample

COMMON = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SIZES = {**COMMON, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
GPT2_SIZES = {**COMMON, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 32}
T5_SIZES = {**COMMON, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8}
VIT_SIZES = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 12}
del VIT_SIZES["vocab_size"]

BLOCKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 4}, "model.layers.1"),
    "mistral": ("MistralForCausalLM", {**SIZES, "num_key_value_heads": 4}, "model.layers.1"),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "num_key_value_heads": 4, "head_dim": 16}, "model.layers.1"),
    "gpt2": ("GPT2LMHeadModel", GPT2_SIZES, "transformer.h.1"),
    "bert": ("BertForMaskedLM", SIZES, "bert.encoder.layer.1"),
    "phi3": ("Phi3ForCausalLM", {**SIZES, "num_key_value_heads": 8}, "model.layers.1"),
    "t5 encoder": ("T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0}, "encoder.block.0"),
    "t5 decoder": ("T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0}, "decoder.block.1"),
}
"""Model class, configuration, and the repeated block in it."""


@functools.cache
def model(name: str, **changes: Any) -> nn.Module:
    """The model of `BLOCKS` in double precision, without dropout."""
    transformers = pytest.importorskip("transformers")
    kind, sizes, _ = BLOCKS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    built: nn.Module = model_class(model_class.config_class(**{**sizes, **changes})).double().eval()
    return built


def forward(model: nn.Module) -> None:
    """Runs a text model on two sequences of 16 tokens, the last of which are padding in one of them."""
    tokens = torch.randint(2, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    more: dict[str, Any] = {"decoder_input_ids": tokens[:, :8]} if hasattr(model, "decoder") else {}
    if "use_cache" in model.config.to_dict():  # type: ignore[operator, union-attr]
        more["use_cache"] = False
    model(input_ids=tokens, attention_mask=torch.arange(16) < torch.tensor([[12], [16]]), **more)


@functools.cache
def block(name: str, **changes: Any) -> UnitSample:
    """The repeated block of a model in `BLOCKS`, with real tensors."""
    return recorded(model(name, **changes), (BLOCKS[name][2],), repeated=True, run=forward)


def recorded(model: nn.Module, names: tuple[str, ...], repeated: bool, run: Callable[[nn.Module], Any]) -> UnitSample:
    """The unit of the modules `names` with the (first) call that each receives when `run` runs the model."""
    calls: dict[str, ModuleCall] = {}

    def watch(position: str, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
            activation = next(key for key, value in arguments.items() if isinstance(value, Tensor))
            calls.setdefault(name, ModuleCall(position, args, kwargs, activation))

        return model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(str(i) if len(names) > 1 else "", name) for i, name in enumerate(names)]
    run(model)
    for handle in handles:
        handle.remove()
    modules = tuple((name, model.get_submodule(name)) for name in names)
    return UnitSample(type(modules[0][1]).__name__, modules, tuple(calls.values()), repeated=repeated)


@functools.cache
def on_meta(unit: UnitSample, tied: frozenset[str] = frozenset()) -> UnitSample:
    """The same unit without values, as the capture gives it. Parameters shared within the unit stay shared."""

    def empty(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.is_floating_point() and tensor.requires_grad)

    memo = {id(p): nn.Parameter(empty(p)) for _, module in unit.modules for p in module.parameters()}
    modules = copy.deepcopy(unit.modules, memo)
    for _, module in modules:
        module.to("meta")  # buffers
    calls = [
        ModuleCall(
            call.module,
            pytree.tree_map_only(Tensor, empty, call.args),
            pytree.tree_map_only(Tensor, empty, call.kwargs),
            call.activation,
        )
        for call in unit.calls
    ]
    return UnitSample(unit.unit_class, modules, tuple(calls), unit.num_samples, unit.repeated, tied)
