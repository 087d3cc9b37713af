"""Modules that cannot be traced: what they return and what they do is seen in a run with made-up values on the CPU.

Such a module may do what meta tensors cannot: ask for values, or choose its path by data. One run is then one example
of what it does, and is counted as such.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from galv.errors import ModelError

SEED = 0


class Opaque:
    """A module that stands for `module`, with values: its own where it has some, else made up."""

    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.module = _with_values(module, dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for arguments of these shapes, on the meta device. Raises ModelError if it fails."""
        return tree_map_only(Tensor, _on_meta, self.run(self.made_up(args), self.made_up(kwargs)))

    def run(self, args: Any, kwargs: Any) -> Any:
        """What the module returns. Raises ModelError when it fails on values, too."""
        try:
            return self.module(*args, **kwargs)
        except Exception as error:
            raise ModelError(
                f"the opaque module {self.name!r} ({type(self.module).__name__}) fails on made-up values as well: "
                f"{type(error).__name__}: {error}; give a larger part of the model as opaque, or one that takes any "
                "values"
            ) from error

    def made_up(self, tree: Any) -> Any:
        """`tree` with values in its tensors, the same each time: normal ones, or 0 and 1 in integers."""
        generator = torch.Generator().manual_seed(SEED)

        def value(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype)
            made = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            return made.requires_grad_(tensor.requires_grad)

        return tree_map_only(Tensor, value, tree)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _with_values(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(SEED)
    replaced: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        value = _value(tensor, generator)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value.to(dtype) if value.is_floating_point() else value, tensor.requires_grad)
        replaced[id(tensor)] = value
    return copy.deepcopy(module, replaced).train()


def _value(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_meta:
        return tensor.detach().to("cpu", copy=True)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor.dtype)
