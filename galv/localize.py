"""Runs a unit's own, unmodified modules on one rank's shard of them: what a `TensorParallelLayout` *means*.

Two callers give the same hooks different hands: the runtime moves real tensors between ranks, the capture only records
what would move. So what is priced and what runs cannot drift apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from galv.planner.plan import LocalArgument, ModuleLayout, Redistribution, TensorParallelLayout

Redistribute = Callable[[Tensor, Redistribution], Tensor]
LocalParameter = Callable[[nn.Module, str], Tensor]


def localize(
    module_named: Callable[[str], nn.Module],
    layout: TensorParallelLayout,
    redistribute: Redistribute,
    local_parameter: LocalParameter,
) -> list[RemovableHandle]:
    """Handles of the hooks that make the unit's modules compute on local tensors.

    `module_named` gives a module by its name within the unit, `redistribute` changes a local tensor's layout on the
    tensor axis (with its gradient), and `local_parameter` gives this rank's part of a module's own parameter as stored.
    """
    handles: list[RemovableHandle] = []
    # Borders before arguments: a redistribution at a border must not be counted among the module's own calls.
    for part in layout.modules:
        handles += _install_module(module_named(part.module), part, redistribute, local_parameter)
    for module, arguments in _by_module(layout.local_arguments):
        handles += _install_local_arguments(module_named(module), arguments)
    return handles


# ----------------------------------------------------------------------------------------------- module borders


def _install_module(
    module: nn.Module, part: ModuleLayout, redistribute: Redistribute, local_parameter: LocalParameter
) -> list[RemovableHandle]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for name, change in part.parameters.items():
            # An instance attribute hides the registered parameter for the length of this forward.
            module.__dict__[name] = redistribute(local_parameter(module, name), change)
        args = tuple(_changed(value, part.inputs.get(str(i)), redistribute) for i, value in enumerate(args))
        return args, {key: _changed(value, part.inputs.get(key), redistribute) for key, value in kwargs.items()}

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        for name in part.parameters:
            module.__dict__.pop(name, None)
        if isinstance(output, tuple):
            return tuple(_changed(value, part.outputs.get(str(i)), redistribute) for i, value in enumerate(output))
        return _changed(output, part.outputs.get("0"), redistribute)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _changed(value: Any, change: Redistribution | None, redistribute: Redistribute) -> Any:
    if change is None or not isinstance(value, Tensor) or change.source == change.target:
        return value
    return redistribute(value, change)


# ----------------------------------------------------------------------------------------------- local arguments


def _by_module(arguments: Iterable[LocalArgument]) -> Iterable[tuple[str, list[LocalArgument]]]:
    groups: dict[str, list[LocalArgument]] = {}
    for argument in arguments:
        groups.setdefault(argument.module, []).append(argument)
    return groups.items()


class _LocalArguments(TorchFunctionMode):
    """Rewrites chosen integer arguments of chosen calls while `depth` is 0, that is outside of submodules."""

    def __init__(self, arguments: list[LocalArgument]) -> None:
        super().__init__()
        self.changes = {(a.function, a.occurrence): a.arguments for a in arguments}
        self.functions = {a.function for a in arguments}
        self.seen: dict[str, int] = {}
        self.depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.depth or name not in self.functions:
            return func(*args, **kwargs)
        occurrence = self.seen.get(name, 0)
        self.seen[name] = occurrence + 1
        change = self.changes.get((name, occurrence))
        if change:
            args, kwargs = with_integers((args, kwargs), change.get)
        return func(*args, **kwargs)


def with_integers(tree: Any, change: Callable[[int, int], int]) -> Any:
    """`tree` with its i-th integer `n` replaced by `change(i, n)`.

    Integers are counted in reading order, in sequences and in slices as well (start, stop, step), not in tensors.
    """
    count = itertools.count()

    def visit(value: Any) -> Any:
        if isinstance(value, (bool, Tensor)):
            return value
        if isinstance(value, int):
            return change(next(count), value)
        if isinstance(value, (tuple, list, torch.Size)):
            return tuple(visit(item) for item in value) if not isinstance(value, list) else [visit(x) for x in value]
        if isinstance(value, dict):
            return {key: visit(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(visit(value.start), visit(value.stop), visit(value.step))
        return value

    return visit(tree)


def _install_local_arguments(module: nn.Module, arguments: list[LocalArgument]) -> list[RemovableHandle]:
    active: list[_LocalArguments] = []

    def enter(module: nn.Module, args: Any) -> None:
        active.append(_LocalArguments(arguments))
        active[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if active:
            active.pop().__exit__(None, None, None)

    def descend(module: nn.Module, args: Any) -> None:
        if active:
            active[-1].depth += 1

    def ascend(module: nn.Module, args: Any, output: Any) -> None:
        if active:
            active[-1].depth -= 1

    handles = [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    ]
    for child in module.children():
        handles.append(child.register_forward_pre_hook(descend, prepend=True))
        handles.append(child.register_forward_hook(ascend, always_call=True))
    return handles
