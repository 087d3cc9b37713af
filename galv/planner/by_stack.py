"""A layout given by hand, priced as another software than galv's runtime would run it.

Nothing is searched: blocks go to the pipeline stages as that software puts them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

from galv import __version__
from galv.cost_models.estimate import estimate_plan, stages_step_seconds
from galv.cost_models.stacked import StackPricer, WorkLibrary, reached_cluster
from galv.cost_models.unit import UnitCost, total_flops
from galv.cost_models.work import Setting
from galv.errors import UsageError
from galv.planner.assemble import cluster_of, model_of
from galv.planner.by_hand import Layout
from galv.planner.graph import Exclusion, FactsSource, ModelGraph, UnitRef
from galv.planner.plan import (
    Estimate,
    Pipeline,
    Plan,
    Recompute,
    ScheduleName,
    Stage,
    Strategy,
    Training,
    Unit,
)
from galv.planner.plan_checks import virtual_stages_of
from galv.planner.space import Request, setting_for
from galv.profiles.cluster import ClusterProfile
from galv.profiles.stack import WIDE_JOB_NODES, StackProfile


@dataclass(frozen=True)
class StackExtras:
    """What other software has and galv's runtime has not."""

    virtual_stages: int = 1
    """Chunks of the model on each pipeline rank, interleaved."""
    context: int = 1
    """Context-parallel degree."""
    fused_attention: bool = True

    def check(self) -> None:
        """Nothing when the degrees can be meant. Raises UsageError."""
        if min(self.virtual_stages, self.context) < 1:
            raise UsageError("virtual_stages and cp must be at least 1")


@dataclass(frozen=True)
class StackLayout:
    """What a stack is asked to run."""

    setting: Setting
    zero: int
    recompute: Recompute
    schedule: ScheduleName
    extras: StackExtras = StackExtras()


@dataclass(frozen=True)
class PricedStages:
    """The stages of a layout, or their chunks in the order of the model: their units with what each costs."""

    units: tuple[tuple[tuple[UnitRef, UnitCost], ...], ...]
    estimate: Estimate


def step_seconds(library: WorkLibrary, cluster: ClusterProfile, stack: StackProfile, layout: StackLayout) -> float:
    """Seconds of a step of `layout` under `stack`, as `priced_stages` finds it, without all that it also says."""
    pricer = _pricer(library, cluster, stack, layout)
    return stages_step_seconds(
        _stages(_chunks(pricer, layout)),
        setting=layout.setting,
        schedule=layout.schedule,
        transfer_seconds=pricer.transfer_seconds(),
        virtual_stages=layout.extras.virtual_stages,
        even=True,
        microbatch_seconds=stack.microbatch_seconds,
        step_seconds=_once_seconds(pricer, layout),
    )


def priced_stages(
    library: WorkLibrary, cluster: ClusterProfile, stack: StackProfile, layout: StackLayout, request: Request
) -> PricedStages:
    """What `layout` costs under `stack`. Raises UsageError when the model cannot be cut so."""
    graph = library.graph
    _check(library, layout)
    pricer = _pricer(library, cluster, stack, layout)
    chunks = _chunks(pricer, layout)
    found = estimate_plan(
        _stages(chunks),
        setting=layout.setting,
        schedule=layout.schedule,
        transfer_seconds=pricer.transfer_seconds(),
        cluster=cluster,
        budget_bytes=request.budget_bytes,
        tokens_per_step=request.global_batch * (request.seq_len or 1),
        model_flops=total_flops(graph, 1) * request.global_batch,
        virtual_stages=layout.extras.virtual_stages,
        even=True,
        microbatch_seconds=stack.microbatch_seconds,
        step_seconds=_once_seconds(pricer, layout),
    )
    return PricedStages(tuple(chunks), found)


Chunk = tuple[tuple[UnitRef, UnitCost], ...]


def _pricer(library: WorkLibrary, cluster: ClusterProfile, stack: StackProfile, layout: StackLayout) -> StackPricer:
    return StackPricer(
        library=library,
        cluster=reached_cluster(cluster, stack),
        stack=stack,
        setting=layout.setting,
        zero=layout.zero,
        recompute=layout.recompute,
        fused_attention=layout.extras.fused_attention,
        context=layout.extras.context,
    )


def _chunks(pricer: StackPricer, layout: StackLayout) -> list[Chunk]:
    """The parts that pipeline ranks hold, in the order of the model."""
    graph, costs = pricer.graph, _costs(pricer)
    starts = cut(graph, pricer.stack, layout.setting.pp * layout.extras.virtual_stages)
    return [tuple((unit, costs[unit.name]) for unit in graph.units[a:b]) for a, b in pairwise(starts)]


def _stages(chunks: Sequence[Chunk]) -> list[list[UnitCost]]:
    """The costs of every chunk's units."""
    return [[cost for _, cost in chunk] for chunk in chunks]


def _pipeline(layout: StackLayout) -> Pipeline:
    return Pipeline(degree=layout.setting.pp, schedule=layout.schedule, virtual_stages=layout.extras.virtual_stages)


_LIBRARIES: WeakKeyDictionary[FactsSource, WorkLibrary] = WeakKeyDictionary()


def library_of(graph: ModelGraph) -> WorkLibrary:
    """The work of `graph`, found once for as long as the graph lives."""
    return _LIBRARIES.setdefault(graph.source, WorkLibrary(graph))


def priced_by_stack(
    graph: ModelGraph,
    cluster: ClusterProfile,
    stack: StackProfile,
    layout: Layout,
    extras: StackExtras,
    request: Request,
) -> Plan:
    """The plan of `layout` as `stack` runs it, whether or not it fits. Raises UsageError when it does not divide."""
    return plan_of(library_of(graph), cluster, stack, stack_layout(cluster, layout, extras, request), request)


def stack_layout(cluster: ClusterProfile, layout: Layout, extras: StackExtras, request: Request) -> StackLayout:
    """A user's layout in the terms of the cost models. Raises UsageError when the sizes do not divide."""
    extras.check()
    layout.check_numbers()
    if layout.ep > 1 or layout.offload or layout.dp_shard is not None or layout.dp_replicate is not None:
        raise UsageError("ep, offload, dp_shard and dp_replicate are not known of other software; leave out the stack")
    ranks = layout.tp * layout.pp * extras.context
    dp, rest = divmod(cluster.num_devices, ranks)
    if rest or not dp:
        raise UsageError(
            f"tp {layout.tp} x pp {layout.pp} x cp {extras.context} does not divide {cluster.num_devices} devices"
        )
    rounds, rest = divmod(request.global_batch, dp * layout.micro_batch)
    if rest or not rounds:
        raise UsageError(
            f"global batch {request.global_batch} is not a multiple of {dp} data-parallel groups x micro batch "
            f"{layout.micro_batch}"
        )
    sequence = layout.sequence or ("megatron" if layout.tp > 1 else "none")
    setting = setting_for(request, tp=layout.tp, sequence=sequence, dp=dp, pp=layout.pp, num_microbatches=rounds)
    zero = layout.zero if dp * extras.context > 1 else 0
    return StackLayout(setting, zero, layout.recompute, _schedule(layout, extras), extras)


def _schedule(layout: Layout, extras: StackExtras) -> ScheduleName:
    """The schedule asked for; 1F1B of several chunks a rank is interleaved 1F1B. Raises UsageError for others."""
    v = extras.virtual_stages
    schedule = "none" if layout.pp == 1 else layout.schedule or "1f1b"
    if schedule == "1f1b" and v > 1:
        return "interleaved"
    if v not in virtual_stages_of(schedule):
        raise UsageError(f"the schedule {schedule} does not run {v} chunks of the model on each pipeline rank")
    return schedule


def plan_of(
    library: WorkLibrary, cluster: ClusterProfile, stack: StackProfile, layout: StackLayout, request: Request
) -> Plan:
    """`layout` under `stack` as a plan."""
    priced = priced_stages(library, cluster, stack, layout, request)
    stages = tuple(Stage(units=tuple(_unit(ref, cost.strategy) for ref, cost in units)) for units in priced.units)
    return Plan(
        galv_version=__version__,
        model=model_of(library.graph, None, None),
        cluster=cluster_of(cluster, request),
        training=Training(
            seq_len=request.seq_len,
            global_batch=request.global_batch,
            num_microbatches=layout.setting.num_microbatches,
            precision=request.precision,
            optimizer=request.optimizer,
            stack=stack.name,
        ),
        pipeline=_pipeline(layout),
        stages=stages,
        estimate=priced.estimate,
    )


def _unit(ref: UnitRef, strategy: Strategy) -> Unit:
    """The unit under `strategy`; what stands around the blocks is never recomputed."""
    if ref.name in ("embedding", "head"):
        strategy = strategy.model_copy(update={"recompute": "none"})
    return Unit(name=ref.name, unit_class=ref.unit_class, modules=ref.modules, strategy=strategy)


def _check(library: WorkLibrary, layout: StackLayout) -> None:
    graph, setting = library.graph, layout.setting
    names = [unit.name for unit in graph.units]
    if len(names) < 3 or (names[0], names[-1]) != ("embedding", "head"):
        raise UsageError(f"stacks run models with an embedding, repeated blocks and a head; {graph.name} has not")
    if setting.pp * layout.extras.virtual_stages > len(names) - 2:
        raise UsageError(
            f"pp {setting.pp} x {layout.extras.virtual_stages} virtual stages needs as many blocks; {graph.name} has "
            f"{len(names) - 2}"
        )
    for name in {unit.unit_class for unit in graph.units[1:-1]}:
        placed = library.layout(name, setting)
        if isinstance(placed, Exclusion):
            raise UsageError(f"this model cannot be split so: tp {setting.tp}: {name}: {placed.reason}")


def _once_seconds(pricer: StackPricer, layout: StackLayout) -> float:
    """What a step takes beside the work of its stages: the stack's own, a tied table, stalled exchanges."""
    stack, cluster = pricer.stack, pricer.cluster
    stalls = stack.wide_job_stall_seconds if cluster.num_nodes > WIDE_JOB_NODES else 0.0
    exchanges = stage_exchanges(layout.setting.pp, layout.setting.num_microbatches)
    return stack.step_seconds + _tied_seconds(pricer.graph, pricer) + stalls * exchanges


def stage_exchanges(num_stages: int, num_microbatches: int) -> int:
    """Sends and receives on the longest chain of a one-forward-one-backward pipeline.

    A stage between others makes four for each microbatch, an end two; the first microbatch passes all borders twice.
    """
    if num_stages == 1:
        return 0
    if num_stages == 2:
        return 2 * num_microbatches
    return 4 * (num_microbatches - 1) + 2 * (num_stages - 1)


def _costs(pricer: StackPricer) -> dict[str, UnitCost]:
    """The cost of every unit by its name; each class is priced once."""
    graph = pricer.graph
    first, *blocks, last = graph.units
    tied = bool(graph.tied_units)
    by_class = {name: pricer.block(name) for name in dict.fromkeys(unit.unit_class for unit in blocks)}
    costs = {unit.name: by_class[unit.unit_class] for unit in blocks}
    costs[first.name] = pricer.embedding(first.unit_class)
    costs[last.name] = pricer.head(last.unit_class, tied_copy=tied and pricer.setting.pp == 1)
    return costs


def _tied_seconds(graph: ModelGraph, pricer: StackPricer) -> float:
    if not graph.tied_units or pricer.setting.pp == 1:
        return 0.0
    table = max(graph.classes[graph.units[0].unit_class].parameters, key=lambda p: p.numel)
    return pricer.tied_seconds(table.numel / pricer.setting.tp)


def cut(graph: ModelGraph, stack: StackProfile, num_stages: int) -> tuple[int, ...]:
    """Where the stages start, and the number of units: embedding with the first blocks, head with the last."""
    weights = [0.0] * len(graph.units)
    for i, unit in enumerate(graph.units[1:-1], start=1):
        weights[i] = graph.classes[unit.unit_class].num_parameters if stack.cut == "cost" else 1.0
    if stack.cut == "cost":
        weights[-1] = max((p.numel for p in graph.classes[graph.units[-1].unit_class].parameters), default=0)
    starts = _starts(weights, num_stages) if stack.cut == "cost" else _even_starts(len(graph.units) - 2, num_stages)
    return (*starts, len(graph.units))


def _even_starts(num_blocks: int, num_stages: int) -> list[int]:
    """The same number of blocks to each stage; what is left over, one each to the stages in the middle."""
    share, rest = divmod(num_blocks, num_stages)
    sizes = [share] * num_stages
    for i in range(rest):
        sizes[(num_stages - rest) // 2 + i] += 1
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size + (1 if len(starts) == 1 else 0))
    return starts


def _starts(weights: Sequence[float], num_stages: int) -> list[int]:
    """A stage takes units until what the stages so far have reaches their part of the weight."""
    total, sofar, starts = sum(weights), 0.0, [0]
    for i, weight in enumerate(weights):
        full = sofar > total * len(starts) / num_stages * (1 + 1e-9)
        needed = len(weights) - i <= num_stages - len(starts)
        if i > starts[-1] and len(starts) < num_stages and (full or needed):
            starts.append(i)
        sofar += weight
    return starts
