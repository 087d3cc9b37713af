"""Which layouts exist for a model on a cluster, and why others do not.

The searched space: pipeline degrees that divide the devices, with any cut of the units; tensor degrees that divide a
stage's devices and stay within a node, with or without sequence-sharded activations between the tensor-parallel
regions; the rest of a stage is data-parallel; every microbatch size that divides; GPipe and 1F1B. Per unit: ZeRO 0 to 3
and, for repeated blocks, recompute none, selective or full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from galv.cost_models.unit import Setting
from galv.errors import UsageError
from galv.planner.graph import ModelGraph
from galv.planner.plan import OptimizerName, Precision, Recompute, ScheduleName, SequenceMode
from galv.profiles.cluster import ClusterProfile

RECOMPUTE_LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Request:
    """What the user asked to train."""

    global_batch: int
    seq_len: int | None
    precision: Precision
    optimizer: OptimizerName
    budget_bytes: int
    """Per device."""


@dataclass(frozen=True)
class Candidate:
    """One outer choice: what all units share, and the schedule."""

    setting: Setting
    schedule: ScheduleName


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending; by its prime factors, as a number may have 40 bits."""
    found = [1]
    for prime, times in _prime_factors(number):
        found = [d * prime**power for d in found for power in range(times + 1)]
    return sorted(found)


def _prime_factors(number: int) -> Iterator[tuple[int, int]]:
    """The primes that divide `number`, ascending, each with how often."""
    prime = 2
    while prime * prime <= number:
        times = 0
        while number % prime == 0:
            number, times = number // prime, times + 1
        if times:
            yield prime, times
        prime += 1 if prime == 2 else 2
    if number > 1:
        yield number, 1


def listed(numbers: Iterable[int], most: int = 12) -> str:
    """`numbers` in words, ascending; of a long list the smallest and the largest."""
    ordered = [str(number) for number in sorted(numbers)]
    if len(ordered) > most:
        ordered = [*ordered[: most - 2], "...", *ordered[-2:]]
    return ", ".join(ordered)


def candidates(graph: ModelGraph, cluster: ClusterProfile, request: Request) -> list[Candidate]:
    """Every outer choice. Raises UsageError when the global batch fits no number of data-parallel groups."""
    found = [
        Candidate(setting, schedule)
        for setting in _settings(graph, cluster, request)
        for schedule in schedules(setting.pp, setting.num_microbatches)
    ]
    if not found:
        raise UsageError(_no_candidate(graph, cluster, request))
    return found


def schedules(pp: int, num_microbatches: int) -> tuple[ScheduleName, ...]:
    """The schedules of a pipeline; with fewer microbatches than stages 1F1B would be GPipe."""
    if pp == 1:
        return ("none",)
    return ("1f1b", "gpipe") if num_microbatches >= pp else ("gpipe",)


def sequence_modes(tp: int) -> tuple[SequenceMode, ...]:
    """The sequence modes for a tensor degree."""
    return ("none",) if tp == 1 else ("megatron", "none")


def zero_levels(dp: int) -> tuple[int, ...]:
    """The ZeRO levels for a data-parallel degree; with one group there is nothing to shard over."""
    return (0,) if dp == 1 else (0, 1, 2, 3)


def recompute_levels(graph: ModelGraph, unit_class: str) -> tuple[Recompute, ...]:
    """What a unit class can recompute: only a unit that is one module can run its forward again."""
    unit = next(unit for unit in graph.units if unit.unit_class == unit_class)
    is_module = len(unit.modules) == 1 and not unit.parameters and unit.name not in ("embedding", "head")
    return RECOMPUTE_LEVELS if is_module and len(graph.units) > 1 else ("none",)


def tensor_degrees(stage_devices: int, cluster: ClusterProfile) -> list[int]:
    """Tensor degrees of a stage: divisors whose group never leaves a node."""
    return [tp for tp in divisors(stage_devices) if cluster.devices_per_node % tp == 0]


def _settings(graph: ModelGraph, cluster: ClusterProfile, request: Request) -> Iterator[Setting]:
    for pp in _pipeline_degrees(graph, cluster):
        for tp in tensor_degrees(cluster.num_devices // pp, cluster):
            dp = cluster.num_devices // (pp * tp)
            if request.global_batch % dp:
                continue
            for rounds in divisors(request.global_batch // dp):
                for sequence in sequence_modes(tp):
                    yield setting_for(request, tp=tp, sequence=sequence, dp=dp, pp=pp, num_microbatches=rounds)


def setting_for(
    request: Request, *, tp: int, sequence: SequenceMode, dp: int, pp: int, num_microbatches: int
) -> Setting:
    """The setting of the given degrees under `request`."""
    return Setting(
        tp=tp,
        sequence=sequence,
        dp=dp,
        pp=pp,
        num_microbatches=num_microbatches,
        microbatch=request.global_batch // (dp * num_microbatches),
        precision=request.precision,
        optimizer=request.optimizer,
    )


def _pipeline_degrees(graph: ModelGraph, cluster: ClusterProfile) -> list[int]:
    """Divisors of the devices; only 1 for a model that cannot be cut."""
    most = 1 if graph.no_pipeline else len(graph.units)
    return [pp for pp in divisors(cluster.num_devices) if pp <= most]


def _no_candidate(graph: ModelGraph, cluster: ClusterProfile, request: Request) -> str:
    groups = {
        cluster.num_devices // (pp * tp)
        for pp in _pipeline_degrees(graph, cluster)
        for tp in tensor_degrees(cluster.num_devices // pp, cluster)
    }
    least = min(groups)
    return (
        f"global batch {request.global_batch} cannot be shared out on {cluster.num_devices} devices: it must be a "
        f"multiple of the number of data-parallel groups, which can be {listed(groups)} here. "
        f"A multiple of {least} would work, such as {max(1, round(request.global_batch / least)) * least}"
    )
