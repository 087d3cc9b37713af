"""What one unit does on one device, and how long its own computation takes.

The bridge between what a unit does (`UnitFacts`: operators, collectives, saved bytes) and what the search chooses from.
Collectives of the tensor and expert axes, and the exchange of heads for sequence on the context axis, are on the
critical path and count whole; keys and values that go around a ring run beside attention and count where they stick
out. The data axes do not matter here: see `data_parallel` and `strategies`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

import numpy as np

from galv.cost_models.communication import Group
from galv.cost_models.compute import phase_seconds, unit_seconds
from galv.cost_models.memory import ModelStates, Passing
from galv.cost_models.network import Network
from galv.cost_models.overlap import resource_of
from galv.cost_models.readings import Ratios, place, ratio_at, ratios
from galv.cost_models.weight_gradients import weight_seconds
from galv.planner.graph import Axis, Exclusion, ModelGraph, Operator, Phase, UnitFacts
from galv.planner.plan import (
    OptimizerName,
    Precision,
    Recompute,
    ScheduleName,
    SequenceLayout,
    SequenceMode,
    Strategy,
    TensorParallelLayout,
    absolute_name,
)
from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile

if TYPE_CHECKING:
    from galv.cost_models.data_parallel import DataCost


@dataclass(frozen=True)
class Outer:
    """What all units of a candidate share."""

    pp: int
    num_microbatches: int
    global_batch: int
    precision: Precision
    optimizer: OptimizerName
    schedule: ScheduleName = "none"
    virtual_stages: int = 1

    def microbatch(self, dp: int) -> int | None:
        """Samples of one of `dp` data-parallel groups in one microbatch; None where that is no whole number."""
        samples, rest = divmod(self.global_batch, self.num_microbatches * dp)
        return samples if samples and not rest else None


@dataclass(frozen=True, slots=True)
class Degrees:
    """How the computation of a unit is divided; the rest of the devices takes other samples."""

    tp: int = 1
    sequence: SequenceMode = "none"
    cp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks that work on the same samples."""
        return self.tp * self.cp


@dataclass(frozen=True, slots=True)
class WorkingBytes:
    """What a unit holds beyond states and activations while it runs."""

    forward_bytes: float
    """Temporaries of forward."""
    backward_bytes: float
    """Recomputed activations and temporaries of backward."""
    passing: Passing = field(default_factory=Passing)
    loss_is_apart: bool = False
    """Whether the temporaries are those of a loss that is no module: parameters are gathered before and after it."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Seconds and bytes of one unit on one device. `..._seconds` are per microbatch unless they say step."""

    strategy: Strategy
    forward_compute_seconds: float
    forward_exposed_seconds: float
    backward_compute_seconds: float
    backward_exposed_seconds: float
    step_exposed_seconds: float
    """Once a step: gradient reduction or parameter gathering that no computation hides."""
    optimizer_seconds: float
    """Once a step: clipping and the update."""
    states: ModelStates
    activation_bytes: float
    """Kept per microbatch in flight."""
    working_bytes: float
    weight_seconds: float = 0.0
    """The part of `backward_compute_seconds` that makes weight gradients and can run later."""
    factor_bytes: float = 0.0
    """Kept per microbatch while only that part is to be run."""
    working: WorkingBytes | None = None
    """The parts of `working_bytes`, where they are known."""

    @property
    def compute_seconds(self) -> float:
        return self.forward_compute_seconds + self.backward_compute_seconds

    @property
    def exposed_seconds(self) -> float:
        return self.forward_exposed_seconds + self.backward_exposed_seconds


def exposed_seconds(compute_seconds: float, communication_seconds: float, slowdown: float) -> float:
    """Seconds that communication beside computation adds to it, both `slowdown` times slower while they overlap.

    The shorter of the two lies wholly in the overlap, which stretches it; the rest of the longer one is not slowed.
    """
    shorter = min(compute_seconds, communication_seconds)
    together = max(compute_seconds, communication_seconds) + (slowdown - 1) * shorter
    return together - compute_seconds


def exposed_array(compute_seconds: np.ndarray, communication_seconds: np.ndarray, slowdown: np.ndarray) -> np.ndarray:
    """`exposed_seconds` of every pair."""
    shorter = np.minimum(compute_seconds, communication_seconds)
    together = np.maximum(compute_seconds, communication_seconds) + (slowdown - 1) * shorter
    return np.asarray(together - compute_seconds)


def overlap_slowdown(group: Group, device: DeviceProfile) -> float:
    """How much slower computation and collectives of `group` run while they run together."""
    return device.overlap.between("compute", resource_of(group))


# ----------------------------------------------------------------------------------------------- a unit's own work


@dataclass(frozen=True)
class PricedFacts:
    """What a unit does for one microbatch and how long that takes, whatever the data axes."""

    facts: UnitFacts
    forward_seconds: float
    """Computation, collectives apart; so `backward_seconds`."""
    backward_seconds: float
    forward_sent_seconds: float
    """Exposed collectives of the unit's own axes; so `backward_sent_seconds`."""
    backward_sent_seconds: float
    again: dict[Recompute, tuple[float, float]]
    """(computation, exposed collectives) that recomputation adds to a backward pass."""
    weight_seconds: dict[Recompute, float]
    """The part of backward that makes weight gradients and can run later."""

    def kept_bytes(self, recompute: Recompute) -> float:
        """What recomputation leaves alive from forward to backward, the unit's input not counted."""
        facts = self.facts
        return {"none": facts.saved_bytes, "selective": facts.saved_selective_bytes, "full": 0.0}[recompute]

    def activation_bytes(self, recompute: Recompute) -> float:
        """Kept for one microbatch from forward to backward, the input included where it has to be."""
        facts = self.facts
        given = facts.input_bytes if recompute != "none" or facts.input_is_saved else 0.0
        return given + min(self.kept_bytes(recompute), facts.saved_bytes)

    def forward_working_bytes(self, recompute: Recompute) -> float:
        """Alive in forward beyond what is kept."""
        return max(self.facts.forward_peak_bytes - self.kept_bytes(recompute), 0.0)

    def backward_working_bytes(self, recompute: Recompute) -> float:
        """Alive in backward beyond what was kept: what is computed again, and temporaries."""
        rebuilt = max(self.facts.saved_bytes - self.kept_bytes(recompute), 0.0)
        return rebuilt + self.facts.backward_peak_bytes


class FactsPricer:
    """Prices each (unit class, degrees, microbatch) of one model on one cluster once, whoever asks."""

    def __init__(self, graph: ModelGraph, cluster: ClusterProfile) -> None:
        self.graph, self.cluster, self.network = graph, cluster, Network(cluster)
        self._priced: dict[tuple[str, Degrees, int], PricedFacts] = {}
        self._exclusions: dict[tuple[str, Degrees], str | None] = {}
        self._parameters: dict[tuple[str, Degrees, bool], tuple[float, float]] = {}
        self._sizes: dict[str, float] = {}
        self._flops: dict[int, float] = {}
        self._keys: dict[str, str] = {}
        self._timed: dict[tuple[str, Phase], Ratios] = {}
        self.data_costs: dict[tuple[object, ...], DataCost] = {}
        """What the data axes cost, filled in by `strategies`."""

    def layout(self, unit_class: str, tp: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion | None:
        """The placements of `unit_class`: None at tp 1, an Exclusion where there are none."""
        if tp == 1:
            return None
        return self.graph.source.layout(unit_class, tp, "megatron" if sequence == "megatron" else "none")

    def exclusion(self, unit_class: str, degrees: Degrees) -> str | None:
        """Why `unit_class` cannot be divided so; None where it can."""
        key = (unit_class, degrees)
        if key not in self._exclusions:
            self._exclusions[key] = next(self._reasons(unit_class, degrees), None)
        return self._exclusions[key]

    def _reasons(self, unit_class: str, degrees: Degrees) -> Iterator[str]:
        layout = self.layout(unit_class, degrees.tp, degrees.sequence)
        if isinstance(layout, Exclusion):
            yield f"tp {degrees.tp}: {unit_class}: {layout.reason}"
        elif degrees.cp > 1:
            sequence = self._sequence(unit_class, degrees)
            if isinstance(sequence, Exclusion):
                yield f"{degrees.sequence} {degrees.cp}: {unit_class}: {sequence.reason}"
        if degrees.ep > 1:
            experts = self.graph.source.expert_exclusion(unit_class, degrees.ep, tp=degrees.tp)
            if experts is not None:
                yield f"ep {degrees.ep}: {unit_class}: {experts.reason}"
            if degrees.cp > 1:
                yield f"ep {degrees.ep}: {unit_class}: experts are not shared out beside a context axis"

    def _sequence(self, unit_class: str, degrees: Degrees) -> SequenceLayout | Exclusion | None:
        if degrees.sequence not in ("ulysses", "ring"):
            assert degrees.cp == 1, degrees
            return None
        return self.graph.source.sequence_layout(unit_class, degrees.sequence, degrees.cp, tp=degrees.tp)

    def priced(self, unit_class: str, degrees: Degrees, microbatch: int) -> PricedFacts:
        """Facts and seconds of `unit_class` for `microbatch` samples."""
        key = (unit_class, degrees, microbatch)
        if key not in self._priced:
            measured = tuple(self._measured_ratios(unit_class, phase) for phase in get_args(Phase))
            self._priced[key] = _priced(self._facts(*key), degrees, self.network, measured)
        return self._priced[key]

    def _measured_ratios(self, unit_class: str, phase: Phase) -> Ratios:
        """Seconds of the whole unit as it was timed over what its operators add up to, by those; mostly none."""
        device = self.cluster.device
        if device.measured is None or not device.measured.units:
            return ()
        known, key = (unit_class, phase), self._unit_key(unit_class)
        if known not in self._timed:
            points = []
            for reading in device.measured.units:
                if (reading.unit, reading.phase) == (key, phase):
                    facts = self.graph.source.facts(unit_class, None, reading.samples)
                    curve = phase_seconds(facts.phase(phase), device)
                    points.append((place(curve), reading.seconds, curve))
            self._timed[known] = ratios(points)
        return self._timed[known]

    def _unit_key(self, unit_class: str) -> str:
        if unit_class not in self._keys:
            self._keys[unit_class] = unit_key(self.graph, unit_class)
        return self._keys[unit_class]

    def _facts(self, unit_class: str, degrees: Degrees, microbatch: int) -> UnitFacts:
        layout, sequence = self.layout(unit_class, degrees.tp, degrees.sequence), self._sequence(unit_class, degrees)
        assert not isinstance(layout, Exclusion), layout
        assert not isinstance(sequence, Exclusion), sequence
        if sequence is None and degrees.ep == 1:
            return self.graph.source.facts(unit_class, layout, microbatch)
        return self.graph.source.facts(unit_class, layout, microbatch, sequence=sequence, ep=degrees.ep)

    def sample_bytes(self, unit_class: str) -> float:
        """Bytes of one sample's output of a unit, nothing cut: what neighbours with other layouts exchange."""
        if unit_class not in self._sizes:
            facts = self.graph.source.facts(unit_class, None, self.graph.num_samples)
            self._sizes[unit_class] = facts.output_bytes / self.graph.num_samples
        return self._sizes[unit_class]

    def total_flops(self, num_samples: int) -> float:
        """`total_flops` of the model, counted once."""
        if num_samples not in self._flops:
            self._flops[num_samples] = total_flops(self.graph, num_samples)
        return self._flops[num_samples]

    # -- parameters

    def local_parameters(self, unit_class: str, degrees: Degrees, *, tied_copy: bool = False) -> tuple[float, float]:
        """(parameters, of which are experts') of one rank of the tensor and expert axes.

        `tied_copy` leaves out parameters that another unit already holds.
        """
        key = (unit_class, degrees, tied_copy)
        if key not in self._parameters:
            self._parameters[key] = self._count_parameters(unit_class, degrees, tied_copy)
        return self._parameters[key]

    def _count_parameters(self, unit_class: str, degrees: Degrees, tied_copy: bool) -> tuple[float, float]:
        layout = self.layout(unit_class, degrees.tp, degrees.sequence)
        assert not isinstance(layout, Exclusion), layout
        sharded, tied = _sharded_names(layout), self._tied_names(unit_class) if tied_copy else frozenset()
        total = experts = 0.0
        for parameter in self.graph.classes[unit_class].parameters:
            if parameter.name in tied:
                continue
            local = parameter.numel / (degrees.tp if parameter.name in sharded else 1)
            local /= degrees.ep if parameter.is_expert else 1
            total += local
            experts += local if parameter.is_expert else 0.0
        return total, experts

    def _tied_names(self, unit_class: str) -> frozenset[str]:
        tied = {name for group in self.graph.tied for name in group}
        modules = next(unit.modules for unit in self.graph.units if unit.unit_class == unit_class)
        names = (parameter.name for parameter in self.graph.classes[unit_class].parameters)
        return frozenset(name for name in names if absolute_name(modules, name) in tied)

    @cached_property
    def neighbours(self) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
        """The classes of units that stand before, and of those that stand after, units of each class."""
        pairs = set(pairwise(unit.unit_class for unit in self.graph.units))
        return {
            name: (frozenset(a for a, b in pairs if b == name), frozenset(b for a, b in pairs if a == name))
            for name in self.graph.classes
        }

    @cached_property
    def tied_classes(self) -> frozenset[str]:
        """Classes of units that share parameters with units of other positions."""
        return frozenset(self.graph.units[i].unit_class for group in self.graph.tied_units for i in group)


def _sharded_names(layout: TensorParallelLayout | None) -> frozenset[str]:
    layouts = {} if layout is None else layout.parameter_layouts
    return frozenset(name for name, stored in layouts.items() if stored.kind == "S")


# ----------------------------------------------------------------------------------------------- pricing facts


def unit_key(graph: ModelGraph, unit_class: str) -> str:
    """A hash of what one sample makes a unit do: equal for units with the same work, in whatever model."""
    facts = graph.source.facts(unit_class, None, graph.num_samples)
    work = [(op.name, op.dtype, op.flops, op.bytes_read, op.bytes_written) for op in facts.operators]
    return sha256(repr((graph.num_samples, work)).encode()).hexdigest()[:16]


def _priced(facts: UnitFacts, degrees: Degrees, network: Network, measured: tuple[Ratios, ...]) -> PricedFacts:
    """`measured`: by phase, what timing the whole unit says of the sum of its operators."""
    device = network.cluster.device
    summed = unit_seconds(facts, device)
    ahead, behind = (ratio_at(known, place(x)) if x > 0 else 1.0 for known, x in zip(measured, summed, strict=True))
    forward, backward = summed[0] * ahead, summed[1] * behind
    repeated = tuple(op for op in facts.phase("forward") if op.kind == "memory")
    sent, sent_back = (_sent_seconds(facts, phase, degrees, network) for phase in ("forward", "backward"))
    # Selective recompute keeps what attention put out, and so never sends keys and values around again.
    resent = _critical_seconds(facts, "forward", degrees, network)
    return PricedFacts(
        facts=facts,
        forward_seconds=forward,
        backward_seconds=backward,
        forward_sent_seconds=sent,
        backward_sent_seconds=sent_back,
        again={
            "none": (0.0, 0.0),
            "selective": (ahead * phase_seconds(repeated, device), resent),
            "full": (forward, sent),
        },
        weight_seconds={level: behind * weight_seconds(facts, level, device) for level in get_args(Recompute)},
    )


def axis_of(axis: Axis, degrees: Degrees) -> tuple[int, int]:
    """(stride, size) of one axis of a unit: tensor innermost, then context; experts over the data ranks that follow."""
    if axis == "tensor":
        return 1, degrees.tp
    return (degrees.tp, degrees.cp) if axis == "context" else (degrees.num_ranks, degrees.ep)


def _sent_seconds(facts: UnitFacts, phase: Phase, degrees: Degrees, network: Network) -> float:
    """Exposed seconds of the unit's own collectives in one direction."""
    ring = sum(_collective_seconds(op, degrees, network) for op in _collectives(facts, phase) if _is_ring_step(op))
    critical = _critical_seconds(facts, phase, degrees, network)
    if not ring:
        return critical
    stride, size = axis_of("context", degrees)
    attention = tuple(op for op in facts.phase(phase) if op.kind == "attention")
    device = network.cluster.device
    slowdown = overlap_slowdown(network.group(stride=stride, size=size), device)
    return critical + exposed_seconds(phase_seconds(attention, device), ring, slowdown)


def _critical_seconds(facts: UnitFacts, phase: Phase, degrees: Degrees, network: Network) -> float:
    """Seconds of the collectives that computation waits for."""
    waited = (op for op in _collectives(facts, phase) if not _is_ring_step(op))
    return sum(_collective_seconds(op, degrees, network) for op in waited)


def _collectives(facts: UnitFacts, phase: Phase) -> list[Operator]:
    return [op for op in facts.operators if op.collective is not None and op.phase == phase]


def _is_ring_step(op: Operator) -> bool:
    return op.axis == "context" and op.collective == "p2p"


def _collective_seconds(op: Operator, degrees: Degrees, network: Network) -> float:
    assert op.collective is not None
    stride, size = axis_of(op.axis, degrees)
    return network.seconds(op.collective, op.bytes_read, stride=stride, size=size)


# ----------------------------------------------------------------------------------------------- model FLOPs


ATTENTION_BACKWARD_SHARE = 0.8
"""Of what fused attention does backward: two products for each forward one, without the scores that it forms again."""


def total_flops(graph: ModelGraph, num_samples: int) -> float:
    """Model FLOPs of forward and backward for `num_samples` samples: nothing recomputed, not even inside attention."""
    facts = {name: graph.source.facts(name, None, num_samples) for name in graph.classes}
    return sum(n * sum(_model_flops(op) for op in facts[name].operators) for name, n in graph.counts.items())


def _model_flops(op: Operator) -> float:
    again = op.kind == "attention" and op.phase == "backward"
    return op.flops * (ATTENTION_BACKWARD_SHARE if again else 1.0)
