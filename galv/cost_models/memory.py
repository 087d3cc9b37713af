"""How many bytes one device holds: model states by ZeRO level, what is gathered or reduced for a moment, what is lost.

Activations are the capture's to count (`UnitFacts`) and the estimate's to multiply by the microbatches in flight. The
sizes and lifetimes here are those of torch's FSDP2 (`torch.distributed.fsdp.fully_shard`, files `_fsdp_param_group.py`
and `_fsdp_collectives.py`), applied to each unit at every ZeRO level, over a shard axis of length 1 for zero 0. All
counts of parameters are of one device's tensor-parallel share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


def gather_window_bytes(gathered: Iterable[float]) -> int:
    """What zero 3 holds in gathered parameters at the peak of backward: one unit computes, the next is on its way.

    `gathered` are the `gathered_bytes` of a stage's zero-3 units. `pre_backward` copies a unit out of its all-gather
    buffer, frees the buffer and starts the all-gather of the unit before, so two units are there at once. Forward
    holds up to three copies (`FSDPCommContext.all_gather_state` keeps a unit's buffer until the next is copied
    out), but before the gradients and with fewer activations.
    """
    return ceil(sum(sorted(gathered)[-2:]))


def gradient_window_bytes(trainable: Iterable[float], precision: Precision, *, dp: int, ddp: bool = False) -> int:
    """Gradients in flight at the peak of backward, beyond `ModelStates.gradients_bytes`.

    `trainable` are the trainable parameters of a stage's units. While one unit's gradients form in the compute
    dtype, the fp32 reduction input of the unit after it is kept until its collective ends
    (`FSDPCommContext.reduce_scatter_states`, one at most); then the unit's own input takes its place. 0 where fp32
    runs on a single device, which reduces nothing, and under DistributedDataParallel, whose gradients lie in its
    reduction buckets.
    """
    if ddp or (dp == 1 and precision == "fp32"):
        return 0
    largest = max(trainable, default=0)
    return ceil(largest) * (COMPUTE_BYTES[precision] + FP32_BYTES)


# ----------------------------------------------------------------------------------------------- not the model's


def reserved_bytes(allocated_bytes: float, device: DeviceProfile) -> int:
    """What the device loses beside `allocated_bytes` at the peak: context, communication buffers, allocator slack."""
    return device.context_bytes + ceil(device.allocator_slack * allocated_bytes)


def usable_bytes(budget_bytes: float, device: DeviceProfile) -> int:
    """The most that can be allocated so that it and `reserved_bytes` stay within `budget_bytes`; may be negative."""
    return int((budget_bytes - device.context_bytes) / (1 + device.allocator_slack))
