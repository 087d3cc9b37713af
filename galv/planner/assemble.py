"""Turns what the search found into a Plan: stages of units, layouts, and the estimate in full."""

from __future__ import annotations

from collections.abc import Iterator

from galv import __version__
from galv.cost_models.estimate import estimate_plan, stage_memory
from galv.cost_models.pipeline import num_in_flight
from galv.cost_models.unit import UnitCost, total_flops
from galv.planner.graph import ModelGraph, UnitRef
from galv.planner.plan import (
    Alternative,
    Cluster,
    Estimate,
    Model,
    Pipeline,
    Plan,
    SearchReport,
    Stage,
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
    graph, cluster = priced.pricer.graph, priced.pricer.cluster
    setting = priced.candidate.setting
    stages = tuple(
        Stage(units=tuple(_unit(ref, option) for ref, option in stage)) for stage in _assignment(graph, solution)
    )
    return Plan(
        galv_version=__version__,
        model=model_of(graph, source, inputs_source),
        cluster=cluster_of(cluster, request),
        training=Training(
            seq_len=request.seq_len,
            global_batch=request.global_batch,
            num_microbatches=setting.num_microbatches,
            precision=request.precision,
            optimizer=request.optimizer,
        ),
        pipeline=Pipeline(degree=setting.pp, schedule=priced.candidate.schedule),
        stages=stages,
        layouts=_layouts(priced),
        estimate=estimate(priced, solution, request),
        alternatives=alternatives,
        search=search,
        notes=graph.notes,
    )


def estimate(priced: PricedTable, solution: Solution, request: Request) -> Estimate:
    """The estimate of `solution`, by the same formula that the search minimized."""
    graph = priced.pricer.graph
    found = estimate_plan(
        [[cost for _, cost in stage] for stage in _costs(priced, solution)],
        setting=priced.candidate.setting,
        schedule=priced.candidate.schedule,
        transfer_seconds=priced.table.transfer_seconds,
        cluster=priced.pricer.cluster,
        budget_bytes=request.budget_bytes,
        tokens_per_step=request.global_batch * (request.seq_len or 1),
        model_flops=total_flops(graph, request.global_batch),
    )
    assert abs(found.step_seconds - solution.step_seconds) <= 1e-6 * found.step_seconds, "search and estimate differ"
    return found


def binding_stage(priced: PricedTable, solution: Solution) -> tuple[str, ...]:
    """Where the memory goes in the fullest stage of `solution`, a line each."""
    flights = [
        num_in_flight(priced.table.schedule, stage, priced.table.num_stages, priced.table.num_microbatches)
        for stage in range(priced.table.num_stages)
    ]
    stages = list(_costs(priced, solution))
    memories = [
        stage_memory([cost for _, cost in stage], flying, priced.pricer.cluster)
        for stage, flying in zip(stages, flights, strict=True)
    ]
    fullest = max(range(len(memories)), key=lambda i: memories[i].total_bytes)
    memory, units = memories[fullest], [ref.name for ref, _ in stages[fullest]]
    largest, _ = max(stages[fullest], key=lambda pair: pair[1].states.total_bytes + pair[1].working_bytes)
    where = (
        f"stage {fullest} ({unit_names(units)}) holds most, {gib(memory.total_bytes)} GiB: "
        f"parameters {gib(memory.parameters_bytes)}, gradients {gib(memory.gradients_bytes)}, "
        f"optimizer {gib(memory.optimizer_bytes)}, activations {gib(memory.activations_bytes)}, "
        f"working {gib(memory.working_bytes)}, reserved {gib(memory.reserved_bytes)}"
    )
    remedy = "more devices, a smaller global batch or sequence, or --optimizer sgd need less"
    return where, f"its largest unit is {largest.name}", remedy


# ----------------------------------------------------------------------------------------------- parts


def _assignment(graph: ModelGraph, solution: Solution) -> Iterator[list[tuple[UnitRef, Option]]]:
    """For each stage its units with the options chosen for them."""
    for start, stop, choice in zip(solution.cut, solution.cut[1:], solution.stages, strict=False):
        refs = graph.units[start:stop]
        yield list(zip(refs, choice.ordered([ref.unit_class for ref in refs]), strict=True))


def _costs(priced: PricedTable, solution: Solution) -> Iterator[list[tuple[UnitRef, UnitCost]]]:
    for stage in _assignment(priced.pricer.graph, solution):
        yield [(ref, priced.costs[ref.unit_class, option.strategy]) for ref, option in stage]


def _unit(ref: UnitRef, option: Option) -> Unit:
    return Unit(
        name=ref.name,
        unit_class=ref.unit_class,
        modules=ref.modules,
        strategy=option.strategy,
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


def _layouts(priced: PricedTable) -> tuple[TensorParallelLayout, ...]:
    setting, shared = priced.candidate.setting, priced.pricer.shared
    found = (shared.layout(name, setting.tp, setting.sequence) for name in priced.pricer.graph.classes)
    return tuple(layout for layout in found if isinstance(layout, TensorParallelLayout))
