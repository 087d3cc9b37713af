"""Turns what the search found into a Plan: stages of units, layouts, and the estimate in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from galv import __version__
from galv.cost_models.estimate import estimate_plan, rank_memories, stages_step_seconds
from galv.cost_models.unit import FactsPricer, Outer, UnitCost
from galv.planner.graph import ModelGraph, UnitRef
from galv.planner.plan import (
    Alternative,
    Cluster,
    ContextMode,
    Estimate,
    ExpertLayout,
    Model,
    Pipeline,
    Plan,
    SearchReport,
    SequenceLayout,
    SequenceMode,
    Stage,
    Strategy,
    TensorParallelLayout,
    Training,
    Unit,
)
from galv.planner.plan_table import gib, unit_names
from galv.planner.search.solution import Solution
from galv.planner.search.table import Option
from galv.planner.space import Request
from galv.planner.tables import PricedTable
from galv.profiles.cluster import ClusterProfile

PricedUnits = Sequence[Sequence[tuple[UnitRef, UnitCost]]]
"""The units of each stage with what each costs."""


def assemble(
    priced: PricedTable,
    solution: Solution,
    request: Request,
    *,
    source: str | None,
    inputs_source: str | None,
    alternatives: tuple[Alternative, ...],
    search: SearchReport | None,
) -> Plan:
    """The plan of `solution`, complete with its estimate."""
    stages = priced_units(priced, solution)
    found = estimate(priced.pricer, priced.candidate.outer, stages, priced.table.transfer_seconds, request)
    assert abs(found.step_seconds - solution.step_seconds) <= 1e-6 * found.step_seconds, "search and estimate differ"
    return plan_of(
        priced.pricer,
        priced.candidate.outer,
        stages,
        request,
        found,
        source=source,
        inputs_source=inputs_source,
        alternatives=alternatives,
        search=search,
    )


def plan_of(
    shared: FactsPricer,
    outer: Outer,
    stages: PricedUnits,
    request: Request,
    found: Estimate,
    *,
    source: str | None,
    inputs_source: str | None,
    alternatives: tuple[Alternative, ...] = (),
    search: SearchReport | None = None,
) -> Plan:
    """The plan that runs `stages`."""
    graph = shared.graph
    strategies = dict.fromkeys((ref.unit_class, cost.strategy) for stage in stages for ref, cost in stage)
    return Plan(
        galv_version=__version__,
        model=model_of(graph, source, inputs_source),
        cluster=cluster_of(shared.cluster, request),
        training=Training(
            seq_len=request.seq_len,
            global_batch=request.global_batch,
            num_microbatches=outer.num_microbatches,
            precision=request.precision,
            optimizer=request.optimizer,
        ),
        pipeline=pipeline_of(outer),
        stages=tuple(Stage(units=tuple(_unit(ref, cost.strategy) for ref, cost in stage)) for stage in stages),
        layouts=_layouts(shared, strategies),
        experts=expert_layouts(graph, strategies),
        sequence_layouts=_sequence_layouts(graph, strategies),
        estimate=found,
        alternatives=alternatives,
        search=search,
        notes=graph.notes
        + shared.cluster.notes
        + ((EVEN_ROUTING,) if any(strategy.ep > 1 for _, strategy in strategies) else ()),
    )


def pipeline_of(outer: Outer) -> Pipeline:
    """The pipeline of a plan."""
    return Pipeline(degree=outer.pp, schedule=outer.schedule, virtual_stages=outer.virtual_stages)


def estimate(
    shared: FactsPricer, outer: Outer, stages: PricedUnits, transfer_seconds: float, request: Request
) -> Estimate:
    """The estimate of `stages`, by the same formula that the search minimizes."""
    return estimate_plan(
        [[cost for _, cost in stage] for stage in stages],
        setting=outer,
        schedule=outer.schedule,
        transfer_seconds=transfer_seconds,
        cluster=shared.cluster,
        budget_bytes=request.budget_bytes,
        tokens_per_step=request.global_batch * (request.seq_len or 1),
        model_flops=shared.total_flops(request.global_batch),
        virtual_stages=outer.virtual_stages,
    )


def step_seconds(outer: Outer, stages: PricedUnits, transfer_seconds: float) -> float:
    """The seconds of a step that `estimate` gives."""
    return stages_step_seconds(
        [[cost for _, cost in stage] for stage in stages],
        setting=outer,
        schedule=outer.schedule,
        transfer_seconds=transfer_seconds,
        virtual_stages=outer.virtual_stages,
    )


def priced_units(priced: PricedTable, solution: Solution) -> PricedUnits:
    """The units of each stage of `solution` with what each costs, changes of layout in front of it included."""
    graph, before = priced.pricer.graph, None
    stages = []
    for start, stop, choice in zip(solution.cut, solution.cut[1:], solution.stages, strict=False):
        kinds, stage = priced.table.chain[start:stop], []
        for ref, kind, option in zip(graph.units[start:stop], kinds, choice.ordered(kinds), strict=True):
            stage.append((ref, _with_transition(priced, before, kind, option)))
            before = option
        stages.append(stage)
    return stages


def _with_transition(priced: PricedTable, before: Option | None, kind: str, option: Option) -> UnitCost:
    cost = priced.cost(kind, option.strategy)
    if before is None or before.layout == option.layout:
        return cost
    forward, backward = priced.table.transitions[before.layout, option.layout]
    return replace(
        cost,
        forward_exposed_seconds=cost.forward_exposed_seconds + forward,
        backward_exposed_seconds=cost.backward_exposed_seconds + backward,
    )


def binding_stage(priced: PricedTable, solution: Solution) -> tuple[str, ...]:
    """Where the memory goes in the fullest stage of `solution`, a line each."""
    outer, chunks = priced.candidate.outer, priced_units(priced, solution)
    pipeline = pipeline_of(outer)
    stages = [[pair for i in pipeline.stages_of_rank(rank) for pair in chunks[i]] for rank in range(pipeline.degree)]
    found = rank_memories(
        [[[cost for _, cost in chunks[i]] for i in pipeline.stages_of_rank(rank)] for rank in range(pipeline.degree)],
        pipeline,
        outer.num_microbatches,
        priced.pricer.cluster,
    )
    fullest = max(range(len(found)), key=lambda i: found[i].total_bytes)
    memory, units = found[fullest], [ref.name for ref, _ in stages[fullest]]
    largest, _ = max(stages[fullest], key=lambda pair: pair[1].states.total_bytes + pair[1].working_bytes)
    where = (
        f"stage {fullest} ({unit_names(units)}) holds most, {gib(memory.total_bytes)} GiB: "
        f"parameters {gib(memory.parameters_bytes)}, gradients {gib(memory.gradients_bytes)}, "
        f"optimizer {gib(memory.optimizer_bytes)}, activations {gib(memory.activations_bytes)}, "
        f"working {gib(memory.working_bytes)}, reserved {gib(memory.reserved_bytes)}"
    )
    return where, f"its largest unit is {largest.name}"


# ----------------------------------------------------------------------------------------------- parts


def _unit(ref: UnitRef, strategy: Strategy) -> Unit:
    return Unit(
        name=ref.name,
        unit_class=ref.unit_class,
        modules=ref.modules,
        strategy=strategy,
        parameters=ref.parameters,
    )


def model_of(graph: ModelGraph, source: str | None, inputs_source: str | None) -> Model:
    """What a plan says of the model."""
    return Model(
        name=graph.name,
        source=source,
        inputs_source=inputs_source,
        num_parameters=graph.num_parameters,
        num_samples=graph.num_samples,
        inputs=graph.inputs,
        tied=graph.tied,
        fingerprint=graph.fingerprint,
    )


def cluster_of(cluster: ClusterProfile, request: Request) -> Cluster:
    """What a plan says of the devices."""
    return Cluster(
        spec=cluster.spec,
        device=cluster.device.name,
        kind=cluster.device.kind,
        devices_per_node=cluster.devices_per_node,
        num_nodes=cluster.num_nodes,
        memory_budget_bytes=request.budget_bytes,
    )


EVEN_ROUTING = (
    "the estimate takes every expert to get equally many tokens; a step takes as long, and its fullest device as much "
    "memory, as the ranks need whose experts get most"
)
"""What a person should know of a plan that shares experts out."""


def expert_layouts(graph: ModelGraph, strategies: Iterable[tuple[str, Strategy]]) -> tuple[ExpertLayout, ...]:
    """Where the experts are of every unit class, given with its strategies, that is to share them out."""
    classes = dict.fromkeys(name for name, strategy in strategies if strategy.ep > 1)
    found = (graph.source.expert_layout(name) for name in classes)
    return tuple(layout for layout in found if isinstance(layout, ExpertLayout))


def _layouts(shared: FactsPricer, strategies: Iterable[tuple[str, Strategy]]) -> tuple[TensorParallelLayout, ...]:
    """The placements of all (unit class, strategy) that have a tensor axis; alike ones once."""
    keys: dict[tuple[str, int, SequenceMode], None] = {}
    for name, strategy in strategies:
        keys[name, strategy.tp, "megatron" if strategy.sequence == "megatron" else "none"] = None
    found = (shared.layout(*key) for key in keys)
    return tuple(layout for layout in found if isinstance(layout, TensorParallelLayout))


def _sequence_layouts(graph: ModelGraph, strategies: Iterable[tuple[str, Strategy]]) -> tuple[SequenceLayout, ...]:
    """The cuts of the sequence of all (unit class, strategy) that have a context axis; alike ones once."""
    found: dict[tuple[str, ContextMode, int], SequenceLayout] = {}
    for name, strategy in strategies:
        mode, degree = strategy.sequence, strategy.cp
        if mode in ("ulysses", "ring") and (name, mode, degree) not in found:
            layout = graph.source.sequence_layout(name, mode, degree, tp=strategy.tp)
            assert isinstance(layout, SequenceLayout), "a strategy that does not exist has no price"
            found[name, mode, degree] = layout
    return tuple(found.values())
