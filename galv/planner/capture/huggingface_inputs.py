"""Example inputs of transformers models, read off their configuration and the arguments of their forward."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galv.errors import UsageError
from galv.planner.capture.inputs import MakeInputs

DEFAULT_IMAGE_SIZE = 224
"""Pixels of a side, for vision models that take any."""
NUM_AUDIO_SAMPLES = 16000
"""One second, for models that take a waveform."""


@dataclass(frozen=True)
class _Input:
    """One tensor: its shape without the dim of samples, and for integers the exclusive upper bound of its values."""

    shape: tuple[int, ...]
    high: int | None = None


def own_inputs(model_class: Any, config: Any, seq_len: int | None) -> tuple[MakeInputs, dict[str, int]] | None:
    """(inputs on the meta device for a number of samples, upper bounds of the integer ones); None where the model's
    inputs are of a kind that is not known here.

    `seq_len` counts tokens: of a text, of an encoder's and a decoder's alike, of the transcript of speech. Raises
    UsageError when it is missing, too long, or means nothing to the model.
    """
    arguments = [name for name in inspect.signature(model_class.forward).parameters if name != "self"]
    found = dict(_features(arguments, config))
    if not found and "input_ids" not in arguments:
        return None
    has_tokens = "input_ids" in arguments or config.is_encoder_decoder
    if not has_tokens and seq_len is not None:
        raise UsageError(f"{model_class.__name__} reads no tokens, so it takes no sequence length; leave it out")
    if has_tokens:
        length = _length(config, seq_len, optional=bool(found))
        found = _tokens(arguments, config, length) | found
    if "labels" in arguments:
        found |= {"labels": _labels(model_class, config, length if has_tokens else None)}

    def make(num_samples: int) -> dict[str, Tensor]:
        return {name: _empty(num_samples, given) for name, given in found.items()}

    return make, {name: given.high for name, given in found.items() if given.high is not None}


def _empty(num_samples: int, given: _Input) -> Tensor:
    dtype = torch.float32 if given.high is None else torch.int64
    return torch.empty(num_samples, *given.shape, dtype=dtype, device="meta")


def _features(arguments: list[str], config: Any) -> list[tuple[str, _Input]]:
    """Images, spectrograms and waveforms."""
    found = []
    if "pixel_values" in arguments:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", DEFAULT_IMAGE_SIZE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        found.append(("pixel_values", _Input((getattr(vision, "num_channels", 3), height, width))))
    if "input_features" in arguments and hasattr(config, "max_source_positions"):
        # Two convolutions in front of the encoder halve the frames once.
        found.append(("input_features", _Input((config.num_mel_bins, 2 * config.max_source_positions))))
    if "input_values" in arguments:
        found.append(("input_values", _Input((NUM_AUDIO_SAMPLES,))))
    return found


def _tokens(arguments: list[str], config: Any, length: int) -> dict[str, _Input]:
    given = _Input((length,), config.get_text_config().vocab_size)
    names = ["input_ids"] if "input_ids" in arguments else []
    if config.is_encoder_decoder and "labels" not in arguments:
        names.append("decoder_input_ids")
    return dict.fromkeys(names, given)


def _labels(model_class: Any, config: Any, length: int | None) -> _Input:
    """One class for each sample, or one token for each position."""
    name = model_class.__name__
    if length is None or name.endswith("ForSequenceClassification"):
        return _Input((), config.num_labels)
    if name.endswith("ForTokenClassification"):
        return _Input((length,), config.num_labels)
    return _Input((length,), config.get_text_config().vocab_size)


def _length(config: Any, seq_len: int | None, *, optional: bool) -> int:
    """Tokens of a sample; all positions of the model where images or speech are its main input."""
    text = config.get_text_config()
    names = ("max_target_positions", "max_position_embeddings")
    longest = next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if seq_len is None:
        if optional and longest is not None:
            return longest
        limit = f" (at most {longest} for this model)" if longest else ""
        raise UsageError(f"a language model needs a sequence length: give seq_len, --seq-len N{limit}")
    if longest is not None and seq_len > longest:
        raise UsageError(f"sequence length {seq_len} is beyond the model's {longest} positions; use {longest} or less")
    return seq_len
