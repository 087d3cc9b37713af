"""Models from Hugging Face configurations: which class, how it is built, which inputs it takes."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture.inputs import MakeInputs


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "models from Hugging Face configurations need the transformers package, which cannot be imported "
            f"({error}): pip install 'galv[transformers]'"
        ) from error
    return transformers


# ----------------------------------------------------------------------------------------------- configurations


def config_from_file(path: Path) -> Any:
    """The configuration in a config.json or in a folder with one. Raises ModelError saying what is wrong with it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path} has no config.json" if path.is_dir() else f"there is no file {path}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ModelError(f'{file} is no Hugging Face configuration: it has no "model_type", such as "llama"')
    return _config_from_dict(data, file)


def _config_from_dict(data: dict[str, Any], file: Path) -> Any:
    known = _transformers().models.auto.configuration_auto.CONFIG_MAPPING
    kind = data["model_type"]
    if kind not in known:
        close = difflib.get_close_matches(kind, list(known.keys()), n=3)
        guess = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ModelError(
            f"{file}: model_type {kind!r} is none of the {len(list(known.keys()))} that transformers "
            f"{_transformers().__version__} knows.{guess}"
        )
    try:
        return known[kind].from_dict(data)
    except Exception as error:
        raise ModelError(f"{file}: transformers rejects this {kind} configuration: {error}") from error


def config_from_hub(name: str) -> Any:
    """The configuration of a model on the Hugging Face hub, or in its local cache."""
    try:
        return _transformers().AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"cannot get the configuration of hf:{name}: {reason} With no network, give the path of its config.json."
        ) from error


# ----------------------------------------------------------------------------------------------- models


def builder(config: Any) -> Callable[[], nn.Module]:
    """A function that builds the model of `config` on the meta device: float32, fused attention, no cache, training."""
    model_class = _model_class(config)

    def build() -> nn.Module:
        own = type(config).from_dict(config.to_dict())
        for part in {id(part): part for part in (own, own.get_text_config())}.values():
            part.use_cache = False
        with torch.device("meta"):
            model: nn.Module = _with_fused_attention(model_class, own)
        return model.float().train()

    return build


def _with_fused_attention(model_class: Any, config: Any) -> Any:
    try:
        return model_class._from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise ModelError(f"transformers cannot build {model_class.__name__}: {error}") from error
        return model_class._from_config(config, attn_implementation="eager")


def _model_class(config: Any) -> Any:
    """The class that the configuration names, else the causal language model of its type."""
    transformers = _transformers()
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal:
        raise ModelError(
            f"transformers has no causal language model for {config.model_type!r}; name a class in the "
            'configuration\'s "architectures"'
        )
    return causal[type(config)]


# ----------------------------------------------------------------------------------------------- inputs


def is_language_model(model: nn.Module) -> bool:
    """Whether `model` is a transformers model that reads token ids and returns a loss for labels."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    return model.main_input_name == "input_ids"


def token_inputs(config: Any, seq_len: int | None) -> MakeInputs:
    """Token ids and labels, int64 (samples, seq_len), on the meta device. Raises UsageError for a bad `seq_len`."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    if seq_len is None:
        limit = f" (at most {longest} for this model)" if longest else ""
        raise UsageError(f"a language model needs a sequence length: give seq_len, --seq-len N{limit}")
    if longest is not None and seq_len > longest:
        raise UsageError(f"sequence length {seq_len} is beyond the model's {longest} positions; use {longest} or less")

    def make(num_samples: int) -> dict[str, Tensor]:
        tokens = (torch.empty(num_samples, seq_len, dtype=torch.int64, device="meta") for _ in range(2))
        return dict(zip(("input_ids", "labels"), tokens, strict=True))

    return make


def token_limits(config: Any) -> dict[str, int]:
    """Exclusive upper bounds of the token inputs."""
    vocabulary = config.get_text_config().vocab_size
    return {"input_ids": vocabulary, "labels": vocabulary}
