"""Which collectives one rank calls in a training step of a plan: kind, axis, bytes and how often, to the last byte.

What the cost models price in seconds, listed as the runtime issues it. Bytes are those of the full tensor: what an
all-gather gives, what a reduce-scatter takes (`cost_models.communication`). Groups of one rank are left out.

* Tensor axis: the operators of `UnitFacts`, each microbatch, those of forward again where it is recomputed
  (up to the last operator that keeps something for backward: there recomputing stops).
* Data axes: FSDP2 cuts dim 0 of each parameter and fills the last shard up (`_fsdp_param.py`), gathers a group of
  parameters in one collective in the compute dtype, and reduces their gradients in one in fp32. DistributedDataParallel
  fills buckets in the order of the gradients (`reducer.cpp`, `compute_bucket_assignment_by_size`).
* Pipeline axis: what crosses the borders of the stage.
* Others, small: the count of valid targets, the loss, the gradient norm, tied weights on several stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from galv.cost_models.memory import COMPUTE_BYTES, FP32_BYTES
from galv.planner.graph import CollectiveKind, ModelGraph, Parameter
from galv.planner.plan import Plan, TensorParallelLayout, Unit, absolute_name

Axis = Literal["tensor", "data", "shard", "replicate", "pipeline"]
"""`data` are all data-parallel ranks; `shard` and `replicate` its two parts under hybrid sharding."""

DDP_BUCKET_BYTES = (1 << 20, 25 << 20)
"""Of the first bucket and of the others, at least: DistributedDataParallel's defaults."""
COUNT_BYTES = 8
_Key = tuple[CollectiveKind, Axis, int, str]


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """A collective that one rank calls `count` times a step."""

    kind: CollectiveKind
    axis: Axis
    num_bytes: int
    count: int
    unit: str
    """The unit that it is for; empty for those of the step as a whole."""


def step_collectives(plan: Plan, graph: ModelGraph, stage: int) -> tuple[Collective, ...]:
    """What each rank of pipeline stage `stage` calls in one step of `plan`, whose model is `graph`."""
    counts: Counter[_Key] = Counter()
    for unit, key, count in _Step(plan, graph, stage).all():
        kind, axis, num_bytes = key
        if count and num_bytes:
            counts[kind, axis, num_bytes, unit] += count
    return tuple(Collective(kind, axis, size, n, unit) for (kind, axis, size, unit), n in sorted(counts.items()))


_Call = tuple[str, tuple[CollectiveKind, Axis, int], int]
"""(unit, (kind, axis, bytes), count)."""


class _Step:
    def __init__(self, plan: Plan, graph: ModelGraph, stage: int) -> None:
        self.plan, self.graph, self.stage = plan, graph, stage
        self.units = plan.stages[stage].units
        self.rounds = plan.training.num_microbatches
        self.precision = plan.training.precision

    def all(self) -> Iterator[_Call]:
        """Every collective, in no order."""
        everything = list(self.plan.units())
        for before, unit in zip([None, *everything], everything, strict=False):
            if unit in self.units:
                yield from self._tensor_axis(unit)
                yield from self._change_of_layout(before, unit)
        yield from self._ddp() if uses_ddp(self.plan) else self._fsdp()
        yield from self._borders()
        yield from self._of_the_step()

    # -- tensor axis

    def _tensor_axis(self, unit: Unit) -> Iterator[_Call]:
        if unit.strategy.tp == 1:
            return
        facts = self.graph.source.facts(unit.unit_class, self.plan.layout_of(unit), self.plan.micro_batch)
        operators = facts.operators
        if unit.strategy.recompute != "none":
            operators += facts.phase("forward")[: facts.num_recomputed]
        for op in operators:
            if op.collective == "all_to_all" and self.plan.cluster.kind == "cpu":  # gloo has none
                yield unit.name, ("all_gather", "tensor", round(op.bytes_read) * unit.strategy.tp), self.rounds
            elif op.collective is not None:
                yield unit.name, (op.collective, "tensor", round(op.bytes_read)), self.rounds

    def _change_of_layout(self, before: Unit | None, unit: Unit) -> Iterator[_Call]:
        """What brings the activation of the unit before into the layout of `unit`: one direction is a cut."""
        if before is None or before.activation == unit.activation:
            return
        cut = unit if unit.activation.kind == "S" else before
        facts = self.graph.source.facts(cut.unit_class, self.plan.layout_of(cut), self.plan.micro_batch)
        part = facts.input_bytes if cut is unit else facts.output_bytes
        yield unit.name, ("all_gather", "tensor", round(part) * cut.strategy.tp), self.rounds

    # -- data axes

    def _ddp(self) -> Iterator[_Call]:
        sizes = [FP32_BYTES * prod(shape) for shape, trainable in self._parameters(self.units) if trainable]
        for size in buckets(sizes[::-1]):
            yield "", ("all_reduce", "data", size), 1

    def _fsdp(self) -> Iterator[_Call]:
        for units in self._groups():
            strategy = max((unit.strategy for unit in units), key=lambda s: s.zero)
            shards, replicas, zero = strategy.dp_shard, strategy.dp_replicate, strategy.zero
            shard_axis: Axis = "data" if replicas == 1 else "shard"
            replicate_axis: Axis = "data" if shards == 1 else "replicate"
            name = units[0].name
            whole = sum(padded(shape, shards) for shape, _ in self._parameters(units))
            learned = sum(padded(shape, shards) for shape, trainable in self._parameters(units) if trainable)
            reductions = self.rounds if zero >= 2 else 1
            if shards > 1:
                gathers = 2 * self.rounds if zero == 3 else 1
                yield name, ("all_gather", shard_axis, whole * COMPUTE_BYTES[self.precision]), gathers
                yield name, ("reduce_scatter", shard_axis, learned * FP32_BYTES), reductions
            if replicas > 1:
                yield name, ("all_reduce", replicate_axis, learned // shards * FP32_BYTES), 1

    def _groups(self) -> list[list[Unit]]:
        """The units of the stage, tied ones together: they share one FSDP group."""
        groups = [[unit] for unit in self.units]
        for names in self.plan.model.tied:
            together = [group for group in groups if any(_owns(unit, name) for unit in group for name in names)]
            if len(together) > 1:
                groups = [group for group in groups if group not in together]
                groups.append([unit for group in together for unit in group])
        return groups

    def _parameters(self, units: Sequence[Unit]) -> Iterator[tuple[tuple[int, ...], bool]]:
        """(shape on this rank of the tensor axis, trainable) of each parameter of the units, tied ones once."""
        tied = {name: group[0] for group in self.plan.model.tied for name in group}
        seen: set[str] = set()
        for unit in units:
            cuts = sharded_dims(self.plan.layout_of(unit))
            for parameter in self.graph.classes[unit.unit_class].parameters:
                full_name = absolute_name(unit.modules, parameter.name)
                first = tied.get(full_name, full_name)
                if first not in seen:
                    seen.add(first)
                    yield _local(parameter, cuts, unit.strategy.tp), parameter.trainable

    # -- pipeline axis

    def _borders(self) -> Iterator[_Call]:
        start = sum(len(stage.units) for stage in self.plan.stages[: self.stage])
        for border in (start, start + len(self.units)):
            if 0 < border < len(self.graph.units):
                for edge in self.graph.edges:
                    if edge.crosses(border):
                        size = round(edge.num_bytes(self.plan.micro_batch) / self._cut(border))
                        yield "", ("p2p", "pipeline", size), 2 * self.rounds

    def _cut(self, border: int) -> int:
        """Into how many parts the tensor axis cuts what crosses a border."""
        sender = list(self.plan.units())[border - 1]
        return sender.strategy.tp if sender.activation.kind == "S" else 1

    # -- the step as a whole

    def _of_the_step(self) -> Iterator[_Call]:
        stages, scaled = self.plan.pipeline.degree, self.precision == "fp16"
        if self.plan.data_parallel_degree > 1:
            yield "", ("all_reduce", "data", COUNT_BYTES * (1 + self._num_other_inputs())), 1
            yield "", ("all_reduce", "data", FP32_BYTES), 1
        if stages > 1:
            yield "", ("broadcast", "pipeline", FP32_BYTES), 1
            yield "", ("all_reduce", "pipeline", FP32_BYTES), 1 + scaled
        for axes in self._norm_axes():
            for axis in axes:
                yield "", ("all_reduce", axis, FP32_BYTES), 1 + scaled
        yield from self._tied_copies()

    def _num_other_inputs(self) -> int:
        """Integer inputs beside the targets."""
        integers = [s.name for s in self.plan.model.inputs if not s.dtype.startswith(("float", "bfloat", "complex"))]
        named = [n for n in ("labels", "label", "targets", "target", "lm_labels") if n in integers]
        return len(integers) - bool(named)

    def _norm_axes(self) -> set[tuple[Axis, ...]]:
        """For each way in which gradients are sharded, the axes over which their squares are summed."""
        found: set[tuple[Axis, ...]] = set()
        for units in self._groups():
            strategy = max((unit.strategy for unit in units), key=lambda s: s.zero)
            shard: tuple[Axis, ...] = ()
            if strategy.dp_shard > 1:
                shard = ("data",) if strategy.dp_replicate == 1 else ("shard",)
            for unit in units:
                cuts = sharded_dims(self.plan.layout_of(unit))
                for parameter in self.graph.classes[unit.unit_class].parameters:
                    if parameter.trainable:
                        found.add((*shard, *(("tensor",) if parameter.name in cuts else ())))
        return found

    def _tied_copies(self) -> Iterator[_Call]:
        """Gradients of weights that several stages hold, exchanged by each pair."""
        for names in self.plan.model.tied:
            held = {}
            for index, stage in enumerate(self.plan.stages):
                unit = next((unit for unit in stage.units for name in names if _owns(unit, name)), None)
                if unit is not None:
                    held[index] = unit
            if self.stage in held and len(held) > 1:
                unit = held[self.stage]
                shape = self._shape_of(unit, names)
                rows = ceil(shape[0] / unit.strategy.dp_shard) if shape else 1
                size = FP32_BYTES * rows * prod(shape[1:])
                yield unit.name, ("p2p", "pipeline", size), 2 * (len(held) - 1)

    def _shape_of(self, unit: Unit, names: Sequence[str]) -> tuple[int, ...]:
        cuts = sharded_dims(self.plan.layout_of(unit))
        parameters = self.graph.classes[unit.unit_class].parameters
        own = next(p for p in parameters if absolute_name(unit.modules, p.name) in names)
        return _local(own, cuts, unit.strategy.tp)


# ----------------------------------------------------------------------------------------------- rules


def uses_ddp(plan: Plan) -> bool:
    """Whether DistributedDataParallel runs the plan: fp32, nothing sharded, no pipeline."""
    plain = all(s.zero == 0 and s.tp == 1 and "optimizer" not in s.offload for s in (u.strategy for u in plan.units()))
    return plain and plan.pipeline.degree == 1 and plan.training.precision == "fp32" and plan.data_parallel_degree > 1


def padded(shape: Sequence[int], shards: int) -> int:
    """Elements of a parameter whose dim 0 is cut into `shards` equal parts, the last ones filled up."""
    rows, rest = (shape[0], prod(shape[1:])) if shape else (1, 1)
    return ceil(rows / shards) * shards * rest


def buckets(sizes: Sequence[int]) -> list[int]:
    """Bytes of DistributedDataParallel's buckets for gradients of these bytes, in their order."""
    filled: list[int] = []
    current = 0
    for size in sizes:
        current += size
        if current >= DDP_BUCKET_BYTES[bool(filled)]:
            filled.append(current)
            current = 0
    return [*filled, current] if current else filled


def sharded_dims(layout: TensorParallelLayout | None) -> dict[str, int]:
    """By name within the unit, the dims that the tensor axis cuts parameters along."""
    layouts = {} if layout is None else layout.parameter_layouts
    return {name: stored.dim or 0 for name, stored in layouts.items() if stored.kind == "S"}


def _local(parameter: Parameter, cuts: dict[str, int], tp: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if parameter.name in cuts:
        shape[cuts[parameter.name]] //= tp
    return tuple(shape)


def _owns(unit: Unit, parameter: str) -> bool:
    return parameter in unit.parameters or any(
        not module or parameter.startswith(f"{module}.") for module in unit.modules
    )
