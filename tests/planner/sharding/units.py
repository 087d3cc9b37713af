"""Units of small Hugging Face models with real double-precision weights, and the calls that they receive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from galv.planner.capture.sample import ModuleCall, UnitSample


def recorded(model: nn.Module, names: tuple[str, ...], repeated: bool, run: Callable[[nn.Module], Any]) -> UnitSample:
    """The unit of the modules `names` with the (first) call that each receives when `run` runs the model."""
    calls: dict[str, ModuleCall] = {}

    def watch(position: str, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
            activation = next(key for key, value in arguments.items() if isinstance(value, Tensor))
            calls.setdefault(name, ModuleCall(position, args, kwargs, activation))

        return model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    handles = [watch(str(i) if len(names) > 1 else "", name) for i, name in enumerate(names)]
    run(model)
    for handle in handles:
        handle.remove()
    modules = tuple((name, model.get_submodule(name)) for name in names)
    return UnitSample(type(modules[0][1]).__name__, modules, tuple(calls.values()), repeated=repeated)


def on_meta(unit: UnitSample, tied: frozenset[str] = frozenset()) -> UnitSample:
    """The same unit without values, as the capture gives it. Parameters shared within the unit stay shared."""

    def empty(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.is_floating_point() and tensor.requires_grad)

    memo = {id(p): nn.Parameter(empty(p)) for _, module in unit.modules for p in module.parameters()}
    modules = copy.deepcopy(unit.modules, memo)
    for _, module in modules:
        module.to("meta")  # buffers
    calls = [
        ModuleCall(
            call.module,
            pytree.tree_map_only(Tensor, empty, call.args),
            pytree.tree_map_only(Tensor, empty, call.kwargs),
            call.activation,
        )
        for call in unit.calls
    ]
    return UnitSample(unit.unit_class, modules, tuple(calls), unit.num_samples, unit.repeated, tied)
