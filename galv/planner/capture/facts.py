"""Turns traces into the facts of a unit, and extends facts from two microbatch sizes to any other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from galv.context_parallel import exchanging_attention, local_arguments
from galv.context_parallel.parts import own_part
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.context import RecordedRanks
from galv.planner.capture.device import meta_as
from galv.planner.capture.emulate import Emulation
from galv.planner.capture.experts import sharing_experts
from galv.planner.capture.sample import ModuleCall
from galv.planner.capture.skeleton import detached, differentiable
from galv.planner.capture.trace import Recorder, Trace
from galv.planner.graph import Operator, UnitFacts
from galv.planner.plan import ExpertLayout, SequenceLayout, TensorParallelLayout
from galv.storages import storage_key, tensors_in

_HELD_KINDS = ("matmul", "attention")
"""Operators whose outputs selective recompute keeps."""


NOTHING = UnitFacts((), 0, 0, 0, 0, 0, 0, input_is_saved=False)
"""The facts of a unit that is never used."""


def block_facts(
    block: nn.Module,
    call: ModuleCall,
    device: DeviceKind,
    layout: TensorParallelLayout | None = None,
    sequence: SequenceLayout | None = None,
    experts: tuple[ExpertLayout, int] | None = None,
) -> UnitFacts:
    """The facts of one repeated block for one call of it, on one rank of `layout` and of `sequence`, and of as many as
    `experts` says that share those out."""
    if experts is None:
        return traced_block(block, call, device, layout, sequence)[0]
    recorder = Recorder([])
    with sharing_experts(block, *experts, recorder):
        return traced_block(block, call, device, layout, sequence, recorder)[0]


def traced_block(
    block: nn.Module,
    call: ModuleCall,
    device: DeviceKind,
    layout: TensorParallelLayout | None = None,
    sequence: SequenceLayout | None = None,
    recorder: Recorder | None = None,
) -> tuple[UnitFacts, frozenset[int]]:
    """(facts, those of the call's tensors, in reading order, that the block saves) of one call of `block`."""
    recorder = recorder or Recorder([])
    recorder.parameter_keys |= {storage_key(parameter) for parameter in block.parameters()}
    emulation = None if layout is None else Emulation(block.get_submodule, layout, recorder)
    activation = _local_activation(call, emulation, sequence)
    args, kwargs = _with_activation(call, activation)
    trace = recorder.trace = Trace()
    trace.expect((args, kwargs), activation)
    names = [(name, module) for name, module in block.named_modules() if name]
    with meta_as(device):
        local = emulation.installed() if emulation else nullcontext()
        with local, recorder.naming(names), recorder.forward():
            outputs = differentiable(_called(block, args, kwargs, sequence, device, recorder))
        output_bytes = size_bytes(outputs[0]) if outputs else 0
        trace.output_keys = {storage_key(output) for output in outputs[:1]}
        trace.end_forward()
        parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        own = parameters if emulation is None else emulation.parameters(parameters)
        trace.end_backward(recorder.backward(outputs, [*given, *own])[len(given) :])
    saved = (i for i, tensor in enumerate(tensors_in((args, kwargs))) if storage_key(tensor) in trace.given_saved)
    return facts_of(
        trace, input_bytes=0 if activation is None else size_bytes(activation), output_bytes=output_bytes
    ), frozenset(saved)


def _local_activation(call: ModuleCall, emulation: Emulation | None, sequence: SequenceLayout | None) -> Tensor | None:
    """The activation as one rank gets it."""
    if call.activation is None:
        return None
    activation = detached(call.tensor())
    assert isinstance(activation, Tensor)
    if emulation is not None:
        activation = emulation.activation(activation)
    if sequence is not None:
        part = own_part(activation.detach(), sequence.activation_cut, 0)
        activation = torch.empty_like(part).requires_grad_(activation.requires_grad)
    return activation


def _called(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sequence: SequenceLayout | None,
    device: DeviceKind,
    recorder: Recorder,
) -> Any:
    """What the block returns, on one rank of `sequence`."""
    if sequence is None:
        return block(*args, **kwargs)
    ranks = RecordedRanks(sequence.degree, device, recorder)
    args, kwargs = local_arguments(args, kwargs, sequence, ranks)
    with exchanging_attention(sequence, ranks):
        return block(*args, **kwargs)


def _with_activation(call: ModuleCall, activation: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with `activation` in its place."""
    args, kwargs = list(detached(call.args)), detached(call.kwargs)
    if call.activation is None:
        return tuple(args), kwargs
    if call.activation.isdigit():
        args[int(call.activation)] = activation
    else:
        kwargs[call.activation] = activation
    return tuple(args), kwargs


def size_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def facts_of(trace: Trace, *, input_bytes: int, output_bytes: int) -> UnitFacts:
    """What `trace` saw, as the facts of a unit or of a part of one."""
    held = (op.bytes_written for op in trace.operators if op.phase == "forward" and op.kind in _HELD_KINDS)
    return UnitFacts(
        operators=tuple(trace.operators),
        saved_bytes=trace.saved_bytes,
        saved_selective_bytes=sum(held),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        forward_peak_bytes=trace.forward_peak_bytes,
        backward_peak_bytes=trace.backward_peak_bytes,
        input_is_saved=trace.input_is_saved,
        num_recomputed=trace.num_before_last_saved,
    )


def joined(parts: Sequence[UnitFacts]) -> UnitFacts:
    """The facts of a unit that executes `parts` one after the other."""
    if len(parts) == 1:
        return parts[0]
    saved = [part.saved_bytes for part in parts]
    return UnitFacts(
        operators=tuple(op for part in parts for op in part.phase("forward"))
        + tuple(op for part in reversed(parts) for op in part.phase("backward")),
        saved_bytes=sum(saved),
        saved_selective_bytes=sum(part.saved_selective_bytes for part in parts),
        input_bytes=parts[0].input_bytes,
        output_bytes=parts[-1].output_bytes,
        forward_peak_bytes=max(sum(saved[:i]) + part.forward_peak_bytes for i, part in enumerate(parts)),
        backward_peak_bytes=max(0.0, *(p.backward_peak_bytes - sum(saved[i + 1 :]) for i, p in enumerate(parts))),
        input_is_saved=parts[0].input_is_saved,
        num_recomputed=parts[0].num_recomputed,
    )


# ----------------------------------------------------------------------------------------------- other microbatches


def extended(low: tuple[int, UnitFacts], high: tuple[int, UnitFacts], microbatch: int) -> UnitFacts | None:
    """Facts at `microbatch` samples from those at two other sizes: every size grows as a constant plus a share for
    each sample. None when the two traces do not have the same operators, so that no such rule can be told."""
    (few, first), (many, second) = low, high
    share = (microbatch - few) / (many - few)
    if len(first.operators) != len(second.operators):
        return None
    operators = [_extended_operator(a, b, share) for a, b in zip(first.operators, second.operators, strict=True)]
    if any(operator is None for operator in operators):
        return None
    sizes = ("saved_bytes", "saved_selective_bytes", "input_bytes", "output_bytes")
    peaks = ("forward_peak_bytes", "backward_peak_bytes")
    return UnitFacts(
        operators=tuple(operator for operator in operators if operator is not None),
        input_is_saved=first.input_is_saved,
        num_recomputed=first.num_recomputed,
        **{name: _between(getattr(first, name), getattr(second, name), share) for name in sizes + peaks},
    )


def _between(first: float, second: float, share: float) -> float:
    return first if first == second else first + (second - first) * share


def _extended_operator(a: Operator, b: Operator, share: float) -> Operator | None:
    if (a.name, a.kind, a.phase, a.module, a.dtype, a.axis) != (b.name, b.kind, b.phase, b.module, b.dtype, b.axis):
        return None
    if (a.matmul is None, a.attention is None) != (b.matmul is None, b.attention is None):
        return None
    if a == b:
        return a
    return Operator(
        a.name,
        a.kind,
        a.phase,
        a.module,
        a.dtype,
        _between(a.flops, b.flops, share),
        _between(a.bytes_read, b.bytes_read, share),
        _between(a.bytes_written, b.bytes_written, share),
        _extended_matmul(a, b, share),
        _extended_attention(a, b, share),
        a.collective,
        a.axis,
        a.is_weight_gradient,
    )


def _extended_matmul(a: Operator, b: Operator, share: float) -> tuple[float, float, float, float] | None:
    if a.matmul is None or b.matmul is None:
        return None
    batch, m, n, k = (_between(x, y, share) for x, y in zip(a.matmul, b.matmul, strict=True))
    return batch, m, n, k


def _extended_attention(
    a: Operator, b: Operator, share: float
) -> tuple[float, float, float, float, float, bool] | None:
    if a.attention is None or b.attention is None:
        return None
    pairs = zip(a.attention[:5], b.attention[:5], strict=True)
    batch, heads, query, key, head_dim = (_between(x, y, share) for x, y in pairs)
    return batch, heads, query, key, head_dim, a.attention[5]
