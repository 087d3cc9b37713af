"""Builds an optimizer over a parallel model's parameters, grouped so that its multi-tensor kernels work.

Such kernels take tensors of one device mesh at a time; units with different strategies have different meshes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galv.errors import UnknownName
from galv.planner.plan import OptimizerName

OPTIMIZERS: dict[OptimizerName, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def build_optimizer(
    parameters: Iterable[nn.Parameter], optimizer: str | OptimizerFactory, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer over `parameters`, one parameter group per device mesh, all with the same `options`.

    `optimizer` is a name or an optimizer class. Raises UnknownName.
    """
    factory = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer  # type: ignore[call-overload]
    if factory is None:
        raise UnknownName("optimizer", str(optimizer), OPTIMIZERS)
    groups = [{"params": tensors} for tensors in by_mesh(parameters)]
    kernel = {} if options.keys() & {"foreach", "fused"} else _kernel(factory)
    return factory(groups, **(kernel | options))


def _kernel(factory: OptimizerFactory) -> dict[str, bool]:
    """How the update is done unless the caller says: in as few kernels as DTensors allow.

    Multi-tensor (foreach) kernels form temporaries as large as the state; Adam's fused one has none. DTensor knows no
    other fused update.
    """
    if factory in (torch.optim.Adam, torch.optim.AdamW):
        return {"fused": True}
    return {"foreach": True} if "foreach" in inspect.signature(factory).parameters else {}


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """The tensors in lists of one device mesh each; plain tensors are a list of their own."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
