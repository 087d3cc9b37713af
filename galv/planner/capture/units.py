"""Finds the repeated blocks of a model, and which of them are alike.

Blocks are the children of an `nn.ModuleList` or `nn.Sequential` most of whose parameters lie in children of one type,
some of which have equal structure: equal names and shapes of parameters. The outermost such lists are taken.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

SMALLEST_SHARE = 0.01
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
    kinds = {(type(child), _shapes(child)) for _, child in blocks}
    return blocks if len(kinds) < len(blocks) else []


def num_parameters(module: nn.Module) -> int:
    """Parameter elements of the module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def structure(module: nn.Module) -> Structure:
    """What two modules of equal structure have in common: types, and parameters' names, shapes and trainability."""
    return (type(module), tuple((name, type(child)) for name, child in module.named_modules()), _shapes(module))


def _shapes(module: nn.Module) -> Structure:
    return tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())


def settings(blocks: Sequence[nn.Module]) -> list[Structure]:
    """For each of these alike blocks, the plain attributes that tell some of them from others.

    A setting that no two blocks share tells nothing when it is an index, a name with one in it, or a rate that grows
    with depth; `shift_size` 0 and 3 of two window attentions, or a name as such, does tell.
    """
    columns: dict[tuple[str, str], list[Any]] = {}
    for position, block in enumerate(blocks):
        for name, module in block.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "training" and isinstance(value, (bool, int, float, str)):
                    columns.setdefault((name, key), [None] * len(blocks))[position] = value
    return distinguishing([_without_index(column) for column in columns.values()], len(blocks))


def _without_index(column: Sequence[Any]) -> Sequence[Any]:
    """`column` with what counts the rows taken out, so that rows which differ in nothing else are alike in it."""
    if len(set(column)) < len(column) or any(isinstance(value, (bool, float, type(None))) for value in column):
        return column
    if all(isinstance(value, str) for value in column):
        return [re.sub(r"\d+", "", value) for value in column]
    if all(after - before == 1 for before, after in pairwise(column)):
        return [None] * len(column)
    return [(value,) for value in column] if len(column) == 2 else column


def distinguishing(columns: Sequence[Sequence[Any]], num_rows: int) -> list[Structure]:
    """Each row's values in those columns that are neither all equal nor all different."""
    telling = [column for column in columns if 1 < len(set(column)) < num_rows or _always_tells(column)]
    return [tuple(column[row] for column in telling) for row in range(num_rows)]


def _always_tells(column: Sequence[Any]) -> bool:
    """Whether two rows that differ in it are unlike, with no third one to show that they may be."""
    return len(column) == 2 and len(set(column)) == 2 and all(isinstance(value, (str, bool, tuple)) for value in column)


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
