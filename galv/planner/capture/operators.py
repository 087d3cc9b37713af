"""What one aten call costs: its kind, FLOPs, bytes moved and shape, read off its arguments and results.

FLOPs follow the convention of `torch.utils.flop_counter`: a product of (m, k) and (k, n) is 2mkn; fused attention
counts its two products (five backward) over all scores, causal or not; everything else counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from galv.planner.graph import Operator, OperatorKind, Phase
from galv.storages import storage_key, tensors_in

aten = torch.ops.aten

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_READS_NOTHING = frozenset(
    {"zeros", "ones", "full", "arange", "scalar_tensor", "rand_like", "randn_like", "bernoulli", "zeros_like"}
    | {"ones_like", "full_like", "new_zeros", "new_ones", "new_full", "nll_loss_backward", "zero", "zero_", "fill_"}
    | {"copy_", "normal_", "uniform_", "bernoulli_"}
)
_READS_WHAT_IT_WRITES = frozenset(
    {"embedding", "gather", "index", "index_select", "take", "nll_loss_forward", "nll_loss2d_forward"}
)
"""Operators that pick some elements of their first argument by integer tensors."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """What is known of an operator before it is called."""

    name: str
    flops: Callable[..., int] | None
    mutates: frozenset[str]
    arguments: tuple[str, ...]
    is_attention: bool


@cache
def _traits(func: Any) -> _Traits:
    packet = func.overloadpacket
    schema = func._schema
    mutated = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    names = tuple(a.name for a in schema.arguments)
    name = packet.__name__
    attention = {"query", "key", "value"} <= set(names) and "attention" in name
    return _Traits(name, _FORMULAS.get(packet) or flop_registry.get(packet), frozenset(mutated), names, attention)


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, phase: Phase, module: str) -> Operator:
    """The operator that the call `func(*args, **kwargs) -> out` was."""
    traits = _traits(func)
    inputs = list(tensors_in((args, kwargs)))
    outputs = list(tensors_in(out))
    kind = _kind(traits, inputs, outputs)
    named = dict(zip(traits.arguments, args, strict=False)) | kwargs
    read, written = (0, 0) if kind == "view" else _bytes(traits, named, inputs, outputs)
    flops = traits.flops(*args, **kwargs, out_val=out) if traits.flops is not None else 0
    return Operator(
        name=str(func),
        kind=kind,
        phase=phase,
        module=module,
        dtype=_dtype(kind, inputs, outputs),
        flops=flops,
        bytes_read=read,
        bytes_written=written,
        matmul=_matmul(traits.name, named, out, flops) if kind == "matmul" else None,
        attention=_attention(named) if kind == "attention" else None,
    )


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind the tensor's elements: an expanded dim counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


# ----------------------------------------------------------------------------------------------- kind and bytes


def _kind(traits: _Traits, inputs: list[Tensor], outputs: list[Tensor]) -> OperatorKind:
    if traits.is_attention:
        return "attention"
    if traits.flops is not None:
        return "matmul"
    if traits.name in _ALLOCATIONS:
        return "view"
    if traits.mutates or not outputs:
        return "memory"
    held = {storage_key(tensor) for tensor in inputs}
    return "view" if all(storage_key(tensor) in held for tensor in outputs) else "memory"


def _bytes(traits: _Traits, named: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> tuple[int, int]:
    """(bytes read, bytes written) of a call that moves memory; each input and each fresh output counts once."""
    held = {storage_key(tensor) for tensor in inputs}
    mutated = [tensor for name in traits.mutates for tensor in tensors_in(named.get(name))]
    fresh = {storage_key(tensor): tensor_bytes(tensor) for tensor in outputs if storage_key(tensor) not in held}
    written = sum(fresh.values()) + sum(map(tensor_bytes, mutated))
    if traits.name in _READS_NOTHING:
        skipped = set(map(id, mutated)) or {id(tensor) for tensor in inputs if tensor.is_floating_point()}
        return sum(tensor_bytes(tensor) for tensor in inputs if id(tensor) not in skipped), written
    if traits.name in _READS_WHAT_IT_WRITES:
        indices = sum(tensor_bytes(tensor) for tensor in inputs[1:] if not tensor.is_floating_point())
        return written + indices, written
    return sum(tensor_bytes(tensor) for tensor in {id(tensor): tensor for tensor in inputs}.values()), written


def _dtype(kind: OperatorKind, inputs: list[Tensor], outputs: list[Tensor]) -> str:
    first, second = (inputs, outputs) if kind in ("matmul", "attention") else (outputs, inputs)
    tensors = first or second
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"


# ----------------------------------------------------------------------------------------------- shapes

_FACTORS = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")}
"""Names of the two factors of each product."""


def _matmul(name: str, named: dict[str, Any], out: Any, flops: int) -> tuple[float, float, float, float] | None:
    """(batch, m, n, k) of a matrix product; of a convolution as the product that it is after unfolding."""
    if name in _FACTORS:
        left, right = (named[factor] for factor in _FACTORS[name])
        return prod(left.shape[:-2]), left.shape[-2], right.shape[-1], left.shape[-1]
    if name == "_grouped_mm":
        left, right = named["self"], named["mat2"]
        groups = out.shape[0] if out.ndim == 3 else right.shape[0]
        return groups, flops / (2 * groups * right.shape[-1] * left.shape[-1]), right.shape[-1], left.shape[-1]
    if "weight" in named and flops:
        grads = named.get("grad_output")
        image = out if grads is None else grads
        m, n = image.numel() // image.shape[1], image.shape[1]
        num_products = 1 if grads is None else sum(isinstance(grad, Tensor) for grad in out[:2])
        return num_products, m, n, flops / (2 * m * n * max(num_products, 1))
    return None


def _attention(named: dict[str, Any]) -> tuple[float, float, float, float, float, bool]:
    query, key = named["query"], named["key"]
    batch, heads, length, head_dim = query.shape
    return batch, heads, length, key.shape[-2], head_dim, bool(named.get("is_causal", False))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped_flops(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """Rows in groups, each with a matrix of its own; or, of two matrices, columns in groups."""
    return 2 * left.numel() * right.shape[-1]


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
}
"""Formulas that torch's own counter lacks."""
