"""Says why a model's forward could not be followed: the operator, the module, the line, and how to go on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""Where no line of the model's own is."""


def explained(model: nn.Module, inputs: Mapping[str, Tensor], error: Exception, operator: Any = None) -> str:
    """The message for `error`, raised by the forward of `model` while `operator` (if known) ran on the meta device."""
    given = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    name, module, line = place_of(model, error)
    where = f" in module {name!r} ({type(module).__name__})" if name else ""
    where += f" at {line}" if line else ""
    called = f" calling {operator}" if operator is not None else ""
    reason = f"{type(error).__name__}: {str(error).strip()}"
    return f"the forward of {type(model).__name__} with {given} failed{where}{called}: {reason}{_advice(name, reason)}"


def _advice(name: str, reason: str) -> str:
    if not any(word in reason.lower() for word in ("meta", "fake tensor", "data-dependent")):
        return ""
    hint = (
        " (galv runs it on meta tensors, which have shapes and no values, so its control flow may not depend on data)."
    )
    if name:
        hint += (
            f" Take the choice out of the forward, or have the module as one replicated unit, never traced:"
            f" opaque=[{name!r}], --opaque {name}"
        )
    return hint


def place_of(model: nn.Module, error: BaseException) -> tuple[str, nn.Module, str]:
    """(innermost module by name, that module, "file:line" of the innermost line of the model's own) of `error`."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = list(traceback.walk_tb(error.__traceback__))
    mine = [frame for frame, _ in frames if not frame.f_code.co_filename.startswith(_NOT_THE_MODEL)]
    owners = [owner for frame in mine if id(owner := _self(frame)) in names]
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in frames
        if not frame.f_code.co_filename.startswith(_NOT_THE_MODEL)
    ]
    owner = owners[-1] if owners else model
    return names[id(owner)], owner, lines[-1] if lines else ""


def _self(frame: Any) -> Any:
    """The first argument of the function that runs in `frame`."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
