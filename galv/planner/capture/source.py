"""Where a model comes from: a name, a way to build it and a way to make its inputs.

MODEL, as a person gives it, is a path to a Hugging Face configuration, `hf:NAME`, `package.module:factory`, a module
or a function that builds one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture import huggingface
from galv.planner.capture.huggingface_inputs import own_inputs
from galv.planner.capture.inputs import MakeInputs, inputs_maker


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that can be built, with its inputs."""

    name: str
    source: str | None
    """MODEL as text, None for an object."""
    inputs_source: str | None
    seq_len: int | None
    """Tokens of one sample, None when samples have none."""
    is_fresh: bool
    """Whether `build` makes a new module each time; else it gives a person's own, not to be changed."""
    _build: Callable[[], nn.Module]
    _make_inputs: MakeInputs
    limits: Mapping[str, int] = field(default_factory=dict)
    """Exclusive upper bounds of integer inputs, where known."""

    def build(self) -> nn.Module:
        """The model, on the meta device where it can be built there. Raises ModelError when it cannot be built."""
        return self._build()

    def inputs(self, num_samples: int) -> dict[str, Tensor]:
        """Inputs by keyword name, shapes only, on the meta device."""
        return {name: tensor.to("meta") for name, tensor in self.example(num_samples).items()}

    def example(self, num_samples: int) -> dict[str, Tensor]:
        """Inputs by keyword name, with values where an example has them. Raises ModelError when they are no tensors."""
        return self._make_inputs(num_samples)


def resolve_model(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    seq_len: int | None = None,
    inputs_source: str | None = None,
) -> ModelSource:
    """The source that `model` means. `example_inputs` (or its name `inputs_source`, `package.module:function`) is
    needed for everything but models of transformers; `seq_len` are the tokens of a sample where they read any.

    Raises ModelError or UsageError saying what was given and what would work.
    """
    if isinstance(example_inputs, str):
        inputs_source, example_inputs = example_inputs, None
    if inputs_source is not None:
        example_inputs = imported(inputs_source, "inputs")
    if isinstance(model, str):
        return _from_text(model, example_inputs, seq_len, inputs_source)
    if isinstance(model, nn.Module):
        return _from_builder(type(model).__name__, None, lambda: model, example_inputs, seq_len, inputs_source, False)
    if not callable(model):
        raise ModelError(f"a model is text, an nn.Module or a function that returns one, not {type(model).__name__}")
    name = getattr(model, "__name__", type(model).__name__)
    return _from_builder(name, None, _factory(model, name), example_inputs, seq_len, inputs_source, True)


# ----------------------------------------------------------------------------------------------- text


def _from_text(text: str, example: Any, seq_len: int | None, inputs_source: str | None) -> ModelSource:
    if text.startswith("hf:"):
        name = text.removeprefix("hf:")
        return _from_config(name, text, huggingface.config_from_hub(name), example, seq_len, inputs_source)
    path = Path(text)
    if path.exists() or text.endswith(".json") or "/" in text:
        config = huggingface.config_from_file(path)
        return _from_config(_config_name(path), text, config, example, seq_len, inputs_source)
    if ":" in text:
        factory = _factory(imported(text, "model"), text)
        return _from_builder(text.partition(":")[2], text, factory, example, seq_len, inputs_source, True)
    raise ModelError(
        f"{text!r} is no model: there is no such file. Give a Hugging Face config.json or its folder, hf:NAME, or "
        "package.module:factory"
    )


def _config_name(path: Path) -> str:
    resolved = path.resolve()
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def imported(text: str, role: str) -> Any:
    """The object that `package.module:name` means, with the current folder importable. Raises ModelError."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ModelError(f"{role} {text!r} is not of the form package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"{role} {text!r}: cannot import {module_name}: {error} (looked in {here} too)") from error
    try:
        for part in name.split("."):
            value = getattr(value, part)
    except AttributeError as error:
        raise ModelError(f"{role} {text!r}: {module_name} has no {name}") from error
    if not callable(value):
        raise ModelError(f"{role} {text!r} is {type(value).__name__}, not a function")
    return value


# ----------------------------------------------------------------------------------------------- sources


def _from_config(
    name: str, text: str, config: Any, example: Any, seq_len: int | None, inputs_source: str | None
) -> ModelSource:
    build = huggingface.builder(config)
    if example is not None:
        return _from_builder(name, text, build, example, seq_len, inputs_source, True)
    chosen = huggingface.model_class(config)
    own = own_inputs(chosen, config, seq_len)
    if own is None:
        raise _needs_inputs(name, f"the inputs of {chosen.__name__} are of no kind that galv makes up")
    return ModelSource(name, text, None, seq_len, True, build, *own)


def _from_builder(
    name: str,
    text: str | None,
    build: Callable[[], nn.Module],
    example: Any,
    seq_len: int | None,
    inputs_source: str | None,
    is_fresh: bool,
) -> ModelSource:
    once = cache(build)
    if example is not None:
        make = inputs_maker(example, once)
        return ModelSource(name, text, inputs_source, seq_len, is_fresh, build, make)
    model = once()
    own = own_inputs(type(model), model.config, seq_len) if huggingface.is_own(model) else None
    if own is None:
        raise _needs_inputs(name, "only models of transformers go without")
    return ModelSource(name, text, None, seq_len, is_fresh, build, *own)


def _needs_inputs(name: str, reason: str) -> UsageError:
    return UsageError(
        f"example inputs are needed for {name}: tensors by keyword, a tuple, or a function of the number of samples "
        f"(--inputs package.module:function); {reason}"
    )


def _factory(factory: Any, name: str) -> Callable[[], nn.Module]:
    """Builds on the meta device, or, where the factory cannot (it reads values), where it builds by itself."""

    def build() -> nn.Module:
        try:
            with torch.device("meta"):
                model = factory()
        except Exception:  # noqa: BLE001 -- whatever is wrong shows again below, where it is reported
            model = _built(factory, name)
        if not isinstance(model, nn.Module):
            raise ModelError(f"{name}() returned {type(model).__name__}, not an nn.Module")
        return model

    return build


def _built(factory: Any, name: str) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ModelError(f"{name}() failed: {type(error).__name__}: {error}") from error
