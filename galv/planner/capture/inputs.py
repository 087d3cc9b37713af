"""A model's inputs as tensors by keyword, for any number of samples, from whatever a person gives as an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.planner.plan import InputSpec

MakeInputs = Callable[[int], dict[str, Tensor]]
"""Inputs by keyword for a number of samples."""


def inputs_maker(example: Any, model: Callable[[], nn.Module]) -> MakeInputs:
    """A function of the number of samples from an example: a tensor, a tuple, a dict, or such a function itself.

    Tensors without names take those of the forward of `model()`. A fixed example is repeated or cut to the number of
    samples along dim 0, in every tensor that is as long there as the first one.
    """

    def make(num_samples: int) -> dict[str, Tensor]:
        made = example(num_samples) if callable(example) else example
        named = _by_keyword(made, model)
        return named if callable(example) else _resized(named, num_samples)

    return make


def _by_keyword(made: Any, model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    if isinstance(made, Tensor):
        made = (made,)
    if isinstance(made, Mapping):
        named = dict(made)
    elif isinstance(made, (tuple, list)):
        named = _named_by_forward(tuple(made), model())
    else:
        raise ModelError(f"example inputs are a tensor, a tuple or a dict of tensors, not {type(made).__name__}")
    strangers = [f"{name} is {type(value).__name__}" for name, value in named.items() if not isinstance(value, Tensor)]
    if strangers or not named:
        raise ModelError(f"example inputs must be tensors: {', '.join(strangers) or 'there are none'}")
    return named


def _named_by_forward(values: tuple[Any, ...], model: nn.Module) -> dict[str, Any]:
    names = [name for name, parameter in _arguments(model).items() if _is_named(parameter)]
    if len(values) > len(names):
        raise ModelError(
            f"{len(values)} example inputs for {type(model).__name__}, whose forward takes {len(names)} by name "
            f"({', '.join(names) or 'none'})"
        )
    return dict(zip(names, values, strict=False))


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _resized(named: dict[str, Tensor], num_samples: int) -> dict[str, Tensor]:
    first = next(iter(named.values()))
    if first.ndim == 0:
        raise ModelError("the first example input is a scalar, so it does not show which dim counts samples")
    given = first.shape[0]
    rows = torch.arange(num_samples, device=first.device) % given
    has_samples = {name: tensor.ndim > 0 and tensor.shape[0] == given for name, tensor in named.items()}
    return {name: tensor[rows.to(tensor.device)] if has_samples[name] else tensor for name, tensor in named.items()}


def check_inputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raises ModelError when the model's forward cannot be called with just these keywords."""
    arguments = _arguments(model)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    named = {name: p for name, p in arguments.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    unknown = [name for name in inputs if name not in named and not takes_any]
    missing = [name for name, p in named.items() if p.default is p.empty and name not in inputs]
    if unknown or missing:
        wrong = [f"does not take {', '.join(unknown)}"] * bool(unknown)
        wrong += [f"needs {', '.join(missing)}"] * bool(missing)
        raise ModelError(
            f"the forward of {type(model).__name__} {' and '.join(wrong)}: it was given {', '.join(inputs)} and its "
            f"arguments are {', '.join(named)}"
        )


# ----------------------------------------------------------------------------------------------- description


def input_specs(make: MakeInputs, num_samples: int, limits: Mapping[str, int] | None = None) -> tuple[InputSpec, ...]:
    """The inputs of `num_samples` samples, as data. The dim that counts samples is the one that grows with them.

    `limits` bounds the values of integer inputs; where it does not, the example's own values do.
    """
    few, many = make(num_samples), make(2 * num_samples)
    specs = []
    for name, tensor in few.items():
        dim = _batch_dim(name, tensor.shape, many[name].shape)
        high = (limits or {}).get(name) or _highest(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(InputSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, batch_dim=dim, high=high))
    if all(spec.batch_dim is None for spec in specs):
        names = ", ".join(few)
        raise ModelError(f"the inputs ({names}) have the same shape for {num_samples} and {2 * num_samples} samples")
    return tuple(specs)


def _batch_dim(name: str, few: torch.Size, many: torch.Size) -> int | None:
    changed = [dim for dim, (a, b) in enumerate(zip(few, many, strict=False)) if a != b]
    if len(few) == len(many) and not changed:
        return None
    if len(few) != len(many) or len(changed) > 1 or many[changed[0]] != 2 * few[changed[0]]:
        raise ModelError(
            f"input {name!r} has shape {tuple(few)}, and {tuple(many)} for twice the samples; exactly one dim should "
            "double"
        )
    return changed[0]


def _highest(tensor: Tensor) -> int | None:
    """One more than the largest value of an integer tensor that has values."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None
    return None if tensor.is_meta or not tensor.numel() else max(int(tensor.max()) + 1, 1)
