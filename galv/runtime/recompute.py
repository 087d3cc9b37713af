"""Which activations a unit keeps from forward to backward.

`full` keeps a module's inputs, `selective` also the outputs of matrix products and fused attention; the rest is
computed again during backward (torch's non-reentrant checkpointing, with the random state of the first time).
Collectives of the tensor axis inside the unit run again with it. So does attention with dropout: if what it drew were
kept, dropout after it would draw that instead of its own.

Buffers that a forward changes (running statistics, counters, the vectors of a power iteration) are changed by the first
forward only. The second one works on copies, and sees what the first one saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from galv.planner.plan import Recompute

WRAPPED = "_checkpoint_wrapped_module."
"""What wrapping adds to the names of everything inside a wrapped module."""

_KEPT_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def apply_recompute(parent: nn.Module, name: str, recompute: Recompute) -> None:
    """Wraps the child `name` of `parent` so that calling it keeps only what `recompute` says. In place."""
    if recompute == "none":
        return
    module = parent.get_submodule(name)
    parent._modules[name] = checkpoint_wrapper(module, context_fn=lambda: _contexts(module, recompute))


def original_name(name: str) -> str:
    """A module's or parameter's fully qualified name as it was before any wrapping."""
    return name.replace(WRAPPED, "")


# ----------------------------------------------------------------------------------------------- buffers

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of the first forward and of the one during backward."""


def _contexts(module: nn.Module, recompute: Recompute) -> Contexts:
    selective = recompute == "selective"
    first, again = create_selective_checkpoint_contexts(_policy) if selective else (None, None)
    if not any(True for _ in module.buffers()):
        return first or contextlib.nullcontext(), again or contextlib.nullcontext()
    noting = _Noting(module, first)
    return noting, _OnCopies(module, noting, again)


class _Noting:
    """The first forward of `module` within `inner`: notes what the buffers that it changes were before."""

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] | None) -> None:
        self._module, self._inner = module, inner or contextlib.nullcontext()
        self.before: dict[tuple[int, str], Tensor] = {}
        """By owner and name."""
        self._versions: dict[tuple[int, str], tuple[Tensor, int]] = {}

    def __enter__(self) -> None:
        for owner, name, buffer in _buffers(self._module):
            self.before[id(owner), name] = buffer.detach().clone()
            self._versions[id(owner), name] = buffer, buffer._version
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for owner, name, buffer in _buffers(self._module):
            old, version = self._versions.get((id(owner), name), (None, 0))
            if old is buffer and buffer._version == version:
                del self.before[id(owner), name]
        self._versions.clear()


class _OnCopies:
    """A forward of `module` within `inner` that changes copies of the buffers and leaves the buffers alone.

    Copies and not values restored afterwards, for backward may still need what the forward has read.
    """

    def __init__(self, module: nn.Module, noted: _Noting, inner: AbstractContextManager[Any] | None) -> None:
        self._module, self._noted, self._inner = module, noted, inner or contextlib.nullcontext()
        self._own: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        self._own = list(_buffers(self._module))
        for owner, name, buffer in self._own:
            owner._buffers[name] = self._noted.before.get((id(owner), name), buffer).detach().clone()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        for owner, name, buffer in self._own:
            owner._buffers[name] = buffer
        return self._inner.__exit__(*error)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    return (
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in list(owner._buffers.items())
        if buffer is not None
    )


# ----------------------------------------------------------------------------------------------- operators


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operator in _KEPT and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: attention does if it drops."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0) > 0)


def _kept() -> frozenset[Any]:
    packets = (getattr(torch.ops.aten, name, None) for name in _KEPT_OPERATORS)
    return frozenset(getattr(packet, overload) for packet in packets if packet for overload in packet.overloads())


_KEPT = _kept()
