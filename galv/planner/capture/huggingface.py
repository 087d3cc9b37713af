"""Models from Hugging Face configurations: which class, and how it is built."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from galv.errors import ModelError


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


def builder(config: Any, device: str = "meta") -> Callable[[], nn.Module]:
    """A function that builds the model of `config` on `device`: float32, fused attention, no cache, training."""
    chosen = model_class(config)

    def build() -> nn.Module:
        own = type(config).from_dict(config.to_dict())
        for part in {id(part): part for part in (own, own.get_text_config())}.values():
            part.use_cache = False
        with torch.device(device):
            model: nn.Module = _with_fused_attention(chosen, own)
        if "return_loss" in inspect.signature(chosen.forward).parameters:
            model.forward = partial(model.forward, return_loss=True)
        return model.float().train()

    return build


def _with_fused_attention(chosen: Any, config: Any) -> Any:
    try:
        return chosen._from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise ModelError(f"transformers cannot build {chosen.__name__}: {error}") from error
        return chosen._from_config(config, attn_implementation="eager")


_TASKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
"""What a model of a type is trained for, where its configuration names no class: the first that there is."""


def model_class(config: Any) -> Any:
    """The class that the configuration names, else the one for the first of the tasks that its type has.

    Raises ModelError when there is none.
    """
    transformers = _transformers()
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None:
            return named
    auto = transformers.models.auto.modeling_auto
    for task in _TASKS:
        if getattr(config, "is_decoder", False) and task == "MODEL_FOR_MASKED_LM_MAPPING":
            continue
        found = getattr(auto, task, {}).get(type(config), None)
        if found is not None:
            return found
    raise ModelError(
        f"transformers has no model for {config.model_type!r} of a kind that galv would choose by itself (language, "
        'speech to text, image classification, image and text); name a class in the configuration\'s "architectures"'
    )


def is_own(model: nn.Module) -> bool:
    """Whether `model` is a transformers model, whose configuration says what it takes."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
