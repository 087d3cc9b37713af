"""Which activations a unit keeps from forward to backward.

`full` keeps a module's inputs, `selective` also the outputs of matrix products and fused attention; the rest is
computed again during backward (torch's non-reentrant checkpointing, with the random state of the first time).
Collectives of the tensor axis inside the unit run again with it. So does attention with dropout: if what it drew were
kept, dropout after it would draw that instead of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
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
    options: dict[str, Any] = {}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    parent._modules[name] = checkpoint_wrapper(parent.get_submodule(name), **options)


def original_name(name: str) -> str:
    """A module's or parameter's fully qualified name as it was before any wrapping."""
    return name.replace(WRAPPED, "")


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
