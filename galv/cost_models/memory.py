"""How many bytes one device holds: model states by ZeRO level, what is gathered or reduced for a moment, what is lost.

Activations are the capture's to count (`UnitFacts`) and the estimate's to multiply by the microbatches in flight. The
sizes and lifetimes here are those of torch's FSDP2 (`torch.distributed.fsdp.fully_shard`, files `_fsdp_param_group.py`
and `_fsdp_collectives.py`), applied to each unit at every ZeRO level, over a shard axis of length 1 for zero 0. All
counts of parameters are of one device's tensor-parallel share.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil

from galv.planner.plan import OptimizerName, Precision
from galv.profiles.device import DeviceProfile

FP32_BYTES = 4
COMPUTE_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gathered parameter and of a fresh gradient: MixedPrecisionPolicy(param_dtype=...)."""
STATE_BYTES: dict[OptimizerName, int] = {"adamw": 8, "sgd": 0}
"""Optimizer state for each fp32 master parameter: two moments, or nothing (sgd without momentum)."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One unit's bytes on one device that live through the step."""

    parameters_bytes: int
    """fp32 master shard, and the gathered copy where it is kept from the step's start to its last backward."""
    gradients_bytes: int
    """Once the first microbatch's backward has passed; with one microbatch, what they exceed the copy by that each
    unit's backward frees."""
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def model_states(
    num_parameters: float,
    *,
    trainable: float | None = None,
    zero: int,
    dp_shard: int,
    dp_replicate: int = 1,
    precision: Precision,
    optimizer: OptimizerName,
    num_microbatches: int = 1,
    ddp: bool = False,
) -> ModelStates:
    """The states of a unit with `num_parameters`, `trainable` of which (all, when None) have gradients.

    Masters, their gradients and optimizer state are fp32 at every precision (`reduce_dtype` is fp32, and gradients
    leave the reduction in the master's dtype); zero >= 1 cuts them into `dp_shard` shards. Beyond that:

    * zero 1 and 2 keep the gathered copy through all microbatches (reshard_after_forward False). So does zero 0:
      FSDP2 copies parameters even over a shard axis of length 1 and to the dtype they have. Only where
      DistributedDataParallel runs the plan (`ddp`, fp32), or one device without mixed precision, there is no copy;
    * zero 1 with several microbatches holds whole gradients, in fp32 (`unsharded_accumulated_grad`), until the last
      microbatch's reduce-scatter; with one microbatch it is zero 2;
    * the last backward frees each unit's copy as it makes the unit's gradients, so with a single microbatch the two
      are never there together.
    """
    learned = num_parameters if trainable is None else trainable
    shard, learned_shard = ceil(num_parameters / dp_shard), ceil(learned / dp_shard)
    computes_with_masters = ddp or (precision == "fp32" and dp_shard * dp_replicate == 1)
    copy = gathered_bytes(num_parameters, precision) if zero < 3 and not computes_with_masters else 0
    whole_gradients = zero == 0 or (zero == 1 and num_microbatches > 1)
    gradients = FP32_BYTES * (ceil(learned) if whole_gradients else learned_shard)
    return ModelStates(
        parameters_bytes=FP32_BYTES * shard + copy,
        gradients_bytes=gradients if num_microbatches > 1 else max(gradients - copy, 0),
        optimizer_bytes=STATE_BYTES[optimizer] * learned_shard,
    )


# ----------------------------------------------------------------------------------------------- alive for a moment


def gathered_bytes(num_parameters: float, precision: Precision) -> int:
    """One unit's parameters, whole on this device, in the compute dtype."""
    return ceil(num_parameters) * COMPUTE_BYTES[precision]


@dataclass(frozen=True, slots=True)
class Passing:
    """What of a unit's parameters and gradients comes and goes on one device, in bytes."""

    gathered_bytes: float = 0.0
    """Whole parameters that are there only while the unit runs (zero 3)."""
    buffer_bytes: float = 0.0
    """What they are gathered into: forward holds it until the next unit is gathered
    (`FSDPCommContext.all_gather_state`)."""
    copy_bytes: float = 0.0
    """Of `ModelStates.parameters_bytes` the kept copy; the last backward frees it unit by unit."""
    gradients_bytes: float = 0.0
    """From the unit's first backward on."""
    fresh_bytes: float = 0.0
    """Gradients as a backward makes them, in the compute dtype."""
    input_bytes: float = 0.0
    """They, as the reduction takes them, in fp32; held until the unit before has its own
    (`FSDPCommContext.reduce_scatter_states`, one at most)."""
    output_bytes: float = 0.0
    """They, reduced, before they are added to those of earlier microbatches."""
    accumulates: bool = False
    """Whether whole gradients are kept from microbatch to microbatch, and reduced at the last one only."""

    def plus(self, other: Passing) -> Passing:
        """Of this unit's parameters and others of its."""
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.type != "bool"}
        return replace(self, **summed)


def passing(
    num_parameters: float,
    *,
    zero: int,
    dp_shard: int,
    dp_replicate: int = 1,
    precision: Precision,
    num_microbatches: int = 1,
    ddp: bool = False,
) -> Passing:
    """What comes and goes of a unit with `num_parameters`; arguments as for `model_states`.

    Where fp32 runs on a single device, and under DistributedDataParallel, whose gradients lie in its reduction
    buckets, nothing does: parameters are used and gradients made where they stay.
    """
    whole = gathered_bytes(num_parameters, precision)
    shard = FP32_BYTES * ceil(num_parameters / dp_shard)
    accumulates = zero < 2 and num_microbatches > 1
    kept = FP32_BYTES * ceil(num_parameters) if zero == 0 or accumulates else shard
    if ddp or (precision == "fp32" and dp_shard * dp_replicate == 1):
        return Passing(gradients_bytes=kept, output_bytes=kept, accumulates=True)
    return Passing(
        gathered_bytes=whole if zero == 3 else 0,
        buffer_bytes=whole if dp_shard > 1 else 0,
        copy_bytes=whole if zero < 3 else 0,
        gradients_bytes=kept,
        fresh_bytes=whole,
        input_bytes=FP32_BYTES * ceil(num_parameters),
        output_bytes=shard,
        accumulates=accumulates,
    )


# ----------------------------------------------------------------------------------------------- not the model's


def reserved_bytes(allocated_bytes: float, device: DeviceProfile) -> int:
    """What the device loses beside `allocated_bytes` at the peak: context, communication buffers, allocator slack."""
    return device.context_bytes + ceil(device.allocator_slack * allocated_bytes)


def usable_bytes(budget_bytes: float, device: DeviceProfile) -> int:
    """The most that can be allocated so that it and `reserved_bytes` stay within `budget_bytes`; may be negative."""
    return int((budget_bytes - device.context_bytes) / (1 + device.allocator_slack))
