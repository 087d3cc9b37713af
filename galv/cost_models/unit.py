"""What one unit costs under one strategy: seconds per microbatch, seconds per step, bytes.

The bridge between what a unit does (`UnitFacts`: operators, collectives, saved bytes) and what the search chooses from.
Communication of the tensor axis is on the critical path and counts whole; communication of the data-parallel axis runs
beside computation, and only what sticks out counts ("exposed"), with both slowed while they run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from galv.cost_models.communication import collective_seconds, mesh_group, p2p_seconds
from galv.cost_models.compute import clip_seconds, optimizer_seconds, phase_seconds, unit_seconds
from galv.cost_models.memory import (
    FP32_BYTES,
    ModelStates,
    gather_window_bytes,
    gathered_bytes,
    gradient_window_bytes,
    model_states,
)
from galv.cost_models.weight_gradients import factor_bytes, weight_seconds
from galv.planner.graph import CollectiveKind, Exclusion, ModelGraph, Operator, Phase, UnitFacts
from galv.planner.plan import (
    OptimizerName,
    Precision,
    Recompute,
    SequenceMode,
    Strategy,
    TensorParallelLayout,
    absolute_name,
)
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True)
class Setting:
    """What all units of a candidate share."""

    tp: int
    sequence: SequenceMode
    dp: int
    pp: int
    num_microbatches: int
    microbatch: int
    """Samples of one data-parallel group."""
    precision: Precision
    optimizer: OptimizerName

    @property
    def is_ddp_possible(self) -> bool:
        """Whether the runtime gives the plan to DistributedDataParallel, were every unit at ZeRO 0."""
        return self.dp > 1 and self.tp == self.pp == 1 and self.precision == "fp32"

    def strategy(self, zero: int, recompute: Recompute) -> Strategy:
        """The strategy of a unit in this setting."""
        shard = self.dp if zero else 1
        return Strategy(
            tp=self.tp,
            sequence=self.sequence,
            dp_shard=shard,
            dp_replicate=self.dp // shard,
            zero=zero,
            recompute=recompute,
        )


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


@dataclass(frozen=True, slots=True)
class PricedFacts:
    """What a unit does for one microbatch and how long its own computation takes, whatever the data-parallel axis."""

    layout: TensorParallelLayout | None
    facts: UnitFacts
    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    """The part of forward that selective recompute repeats."""


class FactsPricer:
    """Prices each (unit class, tensor degree, sequence mode, microbatch) once for all settings that share it."""

    def __init__(self, graph: ModelGraph, cluster: ClusterProfile) -> None:
        self.graph, self.cluster = graph, cluster
        self._priced: dict[tuple[str, int, SequenceMode, int], PricedFacts] = {}

    def layout(self, unit_class: str, tp: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion | None:
        """The placements of `unit_class`: None at tp 1, an Exclusion where there are none."""
        return None if tp == 1 else self.graph.source.layout(unit_class, tp, sequence)

    def priced(self, unit_class: str, tp: int, sequence: SequenceMode, microbatch: int) -> PricedFacts:
        """Facts and seconds of `unit_class` for `microbatch` samples."""
        key = (unit_class, tp, sequence, microbatch)
        if key not in self._priced:
            self._priced[key] = self._price(*key)
        return self._priced[key]

    def _price(self, unit_class: str, tp: int, sequence: SequenceMode, microbatch: int) -> PricedFacts:
        layout = self.layout(unit_class, tp, sequence)
        assert not isinstance(layout, Exclusion), layout
        facts = self.graph.source.facts(unit_class, layout, microbatch)
        forward, backward = unit_seconds(facts, self.cluster.device)
        again = tuple(op for op in facts.phase("forward") if op.kind == "memory")
        return PricedFacts(layout, facts, forward, backward, phase_seconds(again, self.cluster.device))


class UnitPricer:
    """Prices the units of one model on one cluster in one setting."""

    def __init__(self, shared: FactsPricer, setting: Setting) -> None:
        self.shared, self.setting = shared, setting
        self.graph, self.cluster = shared.graph, shared.cluster
        self.tensor_group = mesh_group(self.cluster, stride=1, size=setting.tp)
        self.data_group = mesh_group(self.cluster, stride=setting.tp, size=setting.dp)
        self._classes: dict[str, _ClassPricer] = {}

    def transfer_seconds(self) -> float:
        """Seconds to send one microbatch's activation to the next stage."""
        if self.setting.pp == 1:
            return 0.0
        stride = self.cluster.num_devices // self.setting.pp
        crossing = max(self._class(name).facts.output_bytes for name in self.graph.classes) + self._carried_bytes()
        return p2p_seconds(crossing, stride, self.cluster)

    def _carried_bytes(self) -> float:
        """The most that a cut sends beside the largest tensor that crosses it: skips, an encoder's output."""
        most = 0.0
        if all(edge.consumers[-1] == edge.producer + 1 for edge in self.graph.edges):
            return most
        for border in range(1, len(self.graph.units)):
            sizes = [e.num_bytes(self.setting.microbatch) for e in self.graph.edges if e.crosses(border)]
            most = max(most, sum(sizes) - max(sizes, default=0.0))
        return most

    def price(
        self, unit_class: str, zero: int, recompute: Recompute, *, tied_copy: bool = False, ddp: bool = False
    ) -> UnitCost:
        """The cost of one unit of `unit_class`.

        `tied_copy` leaves out parameters that another unit already holds; `ddp` says that DistributedDataParallel runs
        the whole plan, which computes with the masters themselves.
        """
        return self._class(unit_class).price(zero, recompute, tied_copy, ddp)

    def _class(self, unit_class: str) -> _ClassPricer:
        if unit_class not in self._classes:
            setting = self.setting
            priced = self.shared.priced(unit_class, setting.tp, setting.sequence, setting.microbatch)
            self._classes[unit_class] = _ClassPricer(self, unit_class, priced)
        return self._classes[unit_class]


@dataclass(frozen=True)
class _ClassPricer:
    """The parts of a unit class's price that strategies share."""

    pricer: UnitPricer
    unit_class: str
    priced: PricedFacts

    @property
    def facts(self) -> UnitFacts:
        return self.priced.facts

    @cached_property
    def tensor_communication(self) -> tuple[float, float]:
        return self._collectives("forward"), self._collectives("backward")

    def _collectives(self, phase: Phase) -> float:
        return sum(self._collective(op) for op in self.facts.phase(phase) if op.collective is not None)

    def _collective(self, op: Operator) -> float:
        assert op.collective is not None
        return collective_seconds(op.collective, op.bytes_read, self.pricer.tensor_group, self.pricer.cluster)

    def recompute_seconds(self, recompute: Recompute) -> tuple[float, float]:
        """(compute, communication) that recomputation adds to a backward pass."""
        if recompute == "none":
            return 0.0, 0.0
        if recompute == "full":
            return self.priced.forward_seconds, self.tensor_communication[0]
        return self.priced.again_seconds, self.tensor_communication[0]

    def local_parameters(self, tied_copy: bool) -> float:
        """Parameters on one rank of the tensor axis."""
        sharded = self._sharded_names()
        tied = self._tied_names() if tied_copy else frozenset()
        degree = self.pricer.setting.tp
        parameters = self.pricer.graph.classes[self.unit_class].parameters
        return sum(p.numel / (degree if p.name in sharded else 1) for p in parameters if p.name not in tied)

    def _sharded_names(self) -> frozenset[str]:
        modules = self.priced.layout.modules if self.priced.layout else ()
        names = (
            ".".join(part for part in (module.module, name) if part)
            for module in modules
            for name, change in module.parameters.items()
            if change.source.kind == "S"
        )
        return frozenset(names)

    def _tied_names(self) -> frozenset[str]:
        graph = self.pricer.graph
        tied = {name for group in graph.tied for name in group}
        modules = next(unit.modules for unit in graph.units if unit.unit_class == self.unit_class)
        names = (parameter.name for parameter in graph.classes[self.unit_class].parameters)
        return frozenset(name for name in names if absolute_name(modules, name) in tied)

    def price(self, zero: int, recompute: Recompute, tied_copy: bool, ddp: bool) -> UnitCost:
        setting, device = self.pricer.setting, self.pricer.cluster.device
        parameters = self.local_parameters(tied_copy)
        again, again_communication = self.recompute_seconds(recompute)
        forward, backward = self.priced.forward_seconds, self.priced.backward_seconds + again
        data = self._data_parallel(zero, parameters, forward, backward)
        owned = parameters / (setting.dp if zero else 1)
        return UnitCost(
            strategy=setting.strategy(zero, recompute),
            forward_compute_seconds=forward,
            forward_exposed_seconds=self.tensor_communication[0] + data.forward,
            backward_compute_seconds=backward,
            backward_exposed_seconds=self.tensor_communication[1] + again_communication + data.backward,
            step_exposed_seconds=data.step,
            optimizer_seconds=optimizer_seconds(owned, setting.optimizer, setting.precision, device)
            + clip_seconds(owned, device),
            states=self._states(zero, parameters, ddp),
            activation_bytes=self._activation_bytes(recompute),
            working_bytes=self._working_bytes(zero, recompute, parameters, ddp),
            weight_seconds=min(weight_seconds(self.facts, recompute, device), backward),
            factor_bytes=factor_bytes(self.facts, recompute),
        )

    # -- the data-parallel axis

    def _data_parallel(self, zero: int, parameters: float, forward: float, backward: float) -> _DataParallel:
        """Exposed communication of the ZeRO level. The model's first unit has nothing to hide behind."""
        group, cluster = self.pricer.data_group, self.pricer.cluster
        if group.size == 1:
            return _DataParallel()
        slowdown = cluster.device.overlap_slowdown
        alone = self.pricer.graph.units[0].unit_class == self.unit_class and len(self.pricer.graph.units) > 1

        def exposed(compute: float, communication: float) -> float:
            return communication if alone else exposed_seconds(compute, communication, slowdown)

        gather = self._over_data("all_gather", gathered_bytes(parameters, self.pricer.setting.precision))
        scatter = self._over_data("reduce_scatter", parameters * FP32_BYTES)
        if zero == 0:
            return _DataParallel(step=exposed(backward, self._over_data("all_reduce", parameters * FP32_BYTES)))
        if zero == 1:
            return _DataParallel(step=exposed(forward, gather) + exposed(backward, scatter))
        if zero == 2:
            return _DataParallel(step=exposed(forward, gather), backward=exposed(backward, scatter))
        return _DataParallel(forward=exposed(forward, gather), backward=exposed(backward, gather + scatter))

    def _over_data(self, kind: CollectiveKind, num_bytes: float) -> float:
        return collective_seconds(kind, num_bytes, self.pricer.data_group, self.pricer.cluster)

    # -- memory

    def _states(self, zero: int, parameters: float, ddp: bool) -> ModelStates:
        setting = self.pricer.setting
        return model_states(
            parameters,
            zero=zero,
            dp_shard=setting.dp if zero else 1,
            dp_replicate=1 if zero else setting.dp,
            precision=setting.precision,
            optimizer=setting.optimizer,
            num_microbatches=setting.num_microbatches,
            ddp=ddp,
        )

    def _kept_bytes(self, recompute: Recompute) -> float:
        """What recomputation leaves alive from forward to backward, the unit's input not counted."""
        facts = self.facts
        return {"none": facts.saved_bytes, "selective": facts.saved_selective_bytes, "full": 0.0}[recompute]

    def _activation_bytes(self, recompute: Recompute) -> float:
        facts = self.facts
        kept = self._kept_bytes(recompute)
        given = facts.input_bytes if recompute != "none" or facts.input_is_saved else 0.0
        return given + min(kept, facts.saved_bytes)

    def _working_bytes(self, zero: int, recompute: Recompute, parameters: float, ddp: bool) -> float:
        """Alive while this unit runs: recomputed activations, gradients on their way, gathered parameters."""
        facts, setting = self.facts, self.pricer.setting
        kept = self._kept_bytes(recompute)
        rebuilt = max(facts.saved_bytes - kept, 0.0)
        activations = max(facts.forward_peak_bytes - kept, rebuilt + facts.backward_peak_bytes)
        each = gathered_bytes(parameters, setting.precision)
        gathered = gather_window_bytes([each, each]) if zero == 3 else 0
        return activations + gathered + gradient_window_bytes([parameters], setting.precision, dp=setting.dp, ddp=ddp)


@dataclass(frozen=True, slots=True)
class _DataParallel:
    """Exposed seconds of data-parallel communication: per microbatch forward and backward, and once a step."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0


ATTENTION_BACKWARD_SHARE = 0.8
"""Of what fused attention does backward: two products for each forward one, without the scores that it forms again."""


def total_flops(graph: ModelGraph, num_samples: int) -> float:
    """Model FLOPs of forward and backward for `num_samples` samples: nothing recomputed, not even inside attention."""
    facts = {name: graph.source.facts(name, None, num_samples) for name in graph.classes}
    return sum(n * sum(_model_flops(op) for op in facts[name].operators) for name, n in graph.counts.items())


def _model_flops(op: Operator) -> float:
    again = op.kind == "attention" and op.phase == "backward"
    return op.flops * (ATTENTION_BACKWARD_SHARE if again else 1.0)
