"""Lets a forward on the meta device ask for values that do not depend on data.

Models look at tensors of their own making: whether position ids are consecutive, how long a mask is. On the meta
device such a question has no answer, so small tensors that are computed from nothing but constants are computed on the
CPU as well, and their values handed out when asked for. What depends on data, weights or chance stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from galv.storages import tensors_in

MAX_ELEMENTS = 1 << 20
"""Larger tensors (attention masks) are not followed."""


class KnownValues(TorchDispatchMode):
    """Answers `.item()`, `bool()` and the like for meta tensors whose value is known."""

    def __init__(self, known: Mapping[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()
        for tensor, value in (known or {}).items():
            self._values[tensor] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0] in self._values:
            return self._values[args[0]].item()
        out = _called(func, args, kwargs)
        if isinstance(out, Tensor) and out.is_meta and out.numel() <= MAX_ELEMENTS:
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        if all(tensor in self._values for tensor in tensors_in((args, kwargs))) and not _is_random(func):
            args, kwargs = self._on_cpu(args), self._on_cpu(kwargs)
            self._values[out] = func(*args, **kwargs)
        else:
            self._values.pop(out, None)

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, (tuple, list)):
            return type(value)(self._on_cpu(item) for item in value)
        if isinstance(value, dict):
            return {key: self._on_cpu(item) for key, item in value.items()}
        return value


@cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func)


class GroupedProducts(TorchDispatchMode):
    """Lets a forward on the meta device multiply in groups, in any precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _grouped(*args, **kwargs) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A grouped matrix product; torch's own rule for the meta device refuses what it computes elsewhere, fp32."""
    if left.dtype == torch.bfloat16 or not left.is_meta:
        return torch.ops.aten._grouped_mm.default(left, right, *args, **kwargs)
    offsets = kwargs.get("offs", args[0] if args else None)
    if left.ndim == right.ndim == 2:
        assert offsets is not None, "columns in groups need to know where each begins"
        return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])
    groups = (left.shape[0],) if left.ndim == right.ndim == 3 else ()
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])
