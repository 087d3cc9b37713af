"""Finds the repeated blocks of a model, and which of them are alike.

Blocks are the children of an `nn.ModuleList` or `nn.Sequential` most of whose parameters lie in children of one type,
some of which have equal structure: equal names and shapes of parameters. The outermost such lists are taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import nn

SMALLEST_SHARE = 0.1
"""A list with less than this share of the largest list's parameters is no list of blocks (a head of two layers)."""

Structure = Hashable


def block_lists(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The lists of repeated blocks, each as (fully qualified name, module) in the order of the list."""
    found = [blocks for blocks in _outermost("", model) if blocks]
    sizes = [sum(num_parameters(module) for _, module in blocks) for blocks in found]
    return [blocks for blocks, size in zip(found, sizes, strict=True) if size >= SMALLEST_SHARE * max(sizes)]


def _outermost(name: str, module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    blocks = _blocks_of(name, module)
    if blocks:
        yield blocks
        return
    for child_name, child in module.named_children():
        yield from _outermost(f"{name}.{child_name}" if name else child_name, child)


def _blocks_of(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated children of `module`, none when it is no list of blocks."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    prefix = f"{name}." if name else ""
    owners = [(prefix + key, child) for key, child in module.named_children() if num_parameters(child)]
    by_type: dict[type, list[tuple[str, nn.Module]]] = {}
    for key, child in owners:
        by_type.setdefault(type(child), []).append((key, child))
    if not by_type:
        return []
    blocks = max(by_type.values(), key=lambda group: sum(num_parameters(child) for _, child in group))
    kinds = {structure(child) for _, child in blocks}
    return blocks if len(kinds) < len(blocks) else []


def num_parameters(module: nn.Module) -> int:
    """Parameter elements of the module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def structure(module: nn.Module) -> Structure:
    """What two modules of equal structure have in common: types, and parameters' names, shapes and trainability."""
    parameters = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
    return (type(module), tuple((name, type(child)) for name, child in module.named_modules()), parameters)


def settings(blocks: Sequence[nn.Module]) -> list[Structure]:
    """For each of these alike blocks, the plain attributes that tell some of them from others.

    A setting that no two blocks share is an index (`layer_idx`, a drop rate that grows with depth) and tells nothing.
    """
    columns: dict[tuple[str, str], list[Any]] = {}
    for position, block in enumerate(blocks):
        for name, module in block.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "training" and isinstance(value, (bool, int, float, str)):
                    columns.setdefault((name, key), [None] * len(blocks))[position] = value
    return distinguishing(list(columns.values()), len(blocks))


def distinguishing(columns: Sequence[Sequence[Any]], num_rows: int) -> list[Structure]:
    """Each row's values in those columns that are neither all equal nor all different."""
    telling = [column for column in columns if 1 < len(set(column)) < num_rows]
    return [tuple(column[row] for column in telling) for row in range(num_rows)]


def owners(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The smallest modules outside of `blocks` that hold all parameters outside of them, in the model's order.

    A module with parameters of its own is taken with everything in it, unless it contains a block.
    """
    return list(_owners("", model, [name for name, _ in blocks]))


def _owners(name: str, module: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    if name in blocks:
        return
    prefix = f"{name}." if name else ""
    has_own = any(parameter is not None for parameter in module._parameters.values())
    if has_own and not any(block.startswith(prefix) for block in blocks):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _owners(prefix + child_name, child, blocks)


def stray_parameters(model: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the parameters that lie in none of the modules named in `units`."""
    prefixes = tuple(f"{name}." for name in units)
    if "" in units:
        return []
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(prefixes)]
