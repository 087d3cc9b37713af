"""How a meta-device model's tensors are drawn by the model's own rules, one piece of the model at a time.

A piece is an element of the outermost `ModuleList`, `Sequential` or `ModuleDict` (a repeated block), or a single module
outside of those. It is drawn on a copy of the model that is otherwise all meta, by the `_init_weights` of the nearest
enclosing Hugging Face model or by the modules' `reset_parameters`, with a seed made of the run's seed and the piece's
name: what a piece gets depends on no other piece, and on no plan.

Whether a rule wrote every element is checked: what is not written keeps a mark (NaN; for integers, two marks tried in
turn), and a tensor with marks left is an error, not silent garbage.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.runtime.randomness import seed_from
from galv.runtime.ties import Ties, named_tensors, own_tensors

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class _Piece:
    name: str
    modules: tuple[tuple[str, nn.Module], ...]
    """Inner modules before outer ones, named from the root."""


class Initializer:
    """Draws the tensors of a model that lie on the meta device. Copies the model's structure when made."""

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._aliases = _aliases(model)
        self._skeleton = on_meta(model)
        self._ties = Ties(self._skeleton)
        self._pieces = {
            f"{name}.{own}".lstrip("."): piece
            for piece in _pieces(self._skeleton, "")
            for name, module in piece.modules
            for own, _ in own_tensors(module)
        }

    def aliases(self, name: str) -> tuple[str, ...]:
        """All names of the tensor called `name`; the first is the one that `draw` knows it by."""
        return self._aliases[name]

    def draw(self, name: str) -> dict[str, Tensor]:
        """Every tensor of the piece that `name` is in, by first name, tensors that belong to an earlier piece left out.

        Raises ModelError when the model has no rule for one of them.
        """
        piece = self._pieces[name]
        values = self._run(piece, mark=0)
        if any(not value.is_floating_point() for value in values.values()):
            _check_equal(values, self._run(piece, mark=1))
        _check_written(values)
        return values

    def _run(self, piece: _Piece, mark: int) -> dict[str, Tensor]:
        metas = {
            full_name: (module, own, tensor)
            for name, module in piece.modules
            for own, tensor in own_tensors(module)
            if self._aliases[full_name := f"{name}.{own}".lstrip(".")][0] == full_name
        }
        for module, own, tensor in metas.values():
            self._ties.replace(module, own, _marked(tensor, mark, self._device))
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed_from(self._seed, piece.name))
            for name, module in piece.modules:
                _apply_rules(self._skeleton, name, module)
        values = {full_name: getattr(module, own).detach() for full_name, (module, own, _) in metas.items()}
        for module, own, tensor in metas.values():
            self._ties.replace(module, own, tensor)
        return values


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` with every tensor on the meta device."""
    metas: dict[int, object] = {
        id(tensor): nn.Parameter(_meta(tensor), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else _meta(tensor)
        for _, tensor in named_tensors(model)
    }
    return copy.deepcopy(model, metas)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _pieces(module: nn.Module, name: str) -> Iterator[_Piece]:
    if next(own_tensors(module), None) is not None:
        yield _Piece(name, ((name, module),))
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}".lstrip(".")
        if isinstance(module, _CONTAINERS):
            yield _Piece(full_name, tuple(_inner_first(child, full_name)))
        else:
            yield from _pieces(child, full_name)


def _inner_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inner_first(child, f"{name}.{child_name}".lstrip("."))
    yield name, module


def _marked(meta: Tensor, mark: int, device: torch.device) -> Tensor:
    value = torch.full_like(
        meta, float("nan") if meta.is_floating_point() else mark, device=device, requires_grad=False
    )
    return nn.Parameter(value, meta.requires_grad) if isinstance(meta, nn.Parameter) else value


# ----------------------------------------------------------------------------------------------- rules


def _apply_rules(root: nn.Module, name: str, module: nn.Module) -> None:
    """Initializes the module's own tensors by the first rule that writes them."""
    for rule in _rules(root, name, module):
        rule()
        if not any(_has_mark(tensor) for _, tensor in own_tensors(module)):
            return


def _rules(root: nn.Module, name: str, module: nn.Module) -> Iterator[Callable[[], object]]:
    enclosing = [root.get_submodule(name.rsplit(".", i)[0]) for i in range(name.count(".") + 1)] + [root]
    for rule in (getattr(outer, "_init_weights", None) for outer in enclosing):
        if callable(rule):
            yield functools.partial(rule, module)
            break
    for rule in (getattr(module, method, None) for method in ("reset_parameters", "_reset_parameters")):
        if callable(rule):
            yield rule
    if hasattr(module, "config") and not list(module.parameters()):
        yield functools.partial(_rebuild_buffers, module)


def _rebuild_buffers(module: nn.Module) -> None:
    """Buffers of a module that is made of a configuration alone, such as a rotary embedding, from a new one."""
    for name, buffer in type(module)(module.config).named_buffers():
        module.get_buffer(name).copy_(buffer)


def _has_mark(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any())


def _check_written(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if _has_mark(value):
            raise _no_rule(name)


def _check_equal(values: dict[str, Tensor], again: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if not value.is_floating_point() and not torch.equal(value, again[name]):
            raise _no_rule(name)


def _no_rule(name: str) -> ModelError:
    return ModelError(
        f"the model is on the meta device and has no rule that initializes {name!r} (`reset_parameters` of its module, "
        "or `_init_weights` of a Hugging Face model); build the model on a real device, or give its weights"
    )
