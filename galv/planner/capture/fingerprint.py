"""Tells whether two models have the same units: a short hash that needs no trace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from galv.planner.graph import Parameter, UnitRef


def fingerprint_as(model: nn.Module, units: Sequence[UnitRef]) -> str | None:
    """The fingerprint of `model` were its units `units`; None when it has not all their modules.

    It covers the units in order, the name and shape of each of their parameters, and which parameters are tied.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not all(known.issuperset(unit.modules) and held.issuperset(unit.parameters) for unit in units):
        return None
    content: dict[str, Any] = {
        "units": [[unit.name, unit.unit_class, [*unit.modules, *unit.parameters]] for unit in units],
        "parameters": [
            [(p.name, p.shape) for p in unit_parameters(model, unit.modules, unit.parameters)] for unit in units
        ],
        "tied": tied_parameters(model),
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def unit_parameters(model: nn.Module, modules: Sequence[str], direct: Sequence[str] = ()) -> tuple[Parameter, ...]:
    """The parameters of a unit that owns `modules` and `direct`, named within it; those tied within the unit once."""
    found: dict[int, Parameter] = {}
    for i, module in enumerate(modules):
        prefix = f"{i}." if len(modules) > 1 else ""
        for name, p in model.get_submodule(module).named_parameters():
            found.setdefault(id(p), Parameter(prefix + name, tuple(p.shape), p.requires_grad))
    for name in direct:
        p = model.get_parameter(name)
        found.setdefault(id(p), Parameter(f"/{name}", tuple(p.shape), p.requires_grad))
    return tuple(found.values())


def tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
