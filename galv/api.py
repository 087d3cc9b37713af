"""The Python front door: plan a model, price a layout, run a plan. Everything here is also `galv.<name>`.

Planning imports torch only to trace the model; the search and the cost models are plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from galv.arguments import (
    PlanOptions,
    check_name,
    check_patterns,
    cluster_profile,
    constraints_of,
    offload_of,
    seconds_limit,
    training_request,
    whole_number,
)
from galv.errors import ModelError, NoFeasiblePlan, UnknownName, UsageError
from galv.planner.graph import ModelGraph
from galv.planner.plan import (
    MAX_GLOBAL_BATCH,
    MAX_SEQ_LEN,
    OptimizerName,
    Plan,
    Precision,
    Recompute,
    ScheduleName,
    SequenceMode,
)
from galv.planner.reporter import Reporter
from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.stack import StackProfile, load_stack
from galv.tracing import captured, pricer_of

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from galv.planner.ask import Question
    from galv.planner.capture.report import GraphReport
    from galv.planner.front import Front
    from galv.planner.planner import Objective
    from galv.planner.space import Request
    from galv.planner.sweep import Sweep
    from galv.planner.why import Why
    from galv.runtime.check_report import Check
    from galv.runtime.materialize import Weights
    from galv.runtime.module import ParallelModule

MAX_ANSWERS = 100
"""Plans of one answer."""


def plan(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    cluster: str | ClusterProfile,
    global_batch: int,
    seq_len: int | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerName = "adamw",
    memory: float | str | None = None,
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    objective: Objective = "throughput",
    time_limit: float | None = None,
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Plan:
    """The fastest plan found for training `model` on `cluster`, proven optimal in the searched space or with its gap.

    `model`: a path to a Hugging Face config, `hf:NAME`, `package.module:factory`, a module (on the meta device to save
    memory) or a function that builds one. `example_inputs`: tensors by keyword, a tuple, one tensor, or a function of
    the number of samples that returns such; `package.module:function` as text; not needed for language models from
    Hugging Face configs, which take `seq_len` tokens a sample. `global_batch`: samples of one optimizer step over all
    devices. `precision`: None takes bf16 on a GPU that has it, else fp32. `memory`: GiB that one device may hold, or a
    share of what it has ("90%"), all of it when None. `units`: patterns of module names that are to be units, in place
    of what structure shows. `opaque`: patterns of modules that are not traced, each one unit held whole. `reporter`
    hears of the progress.

    `require` and `forbid`: demands such as `tp=8`, `pp<=4`, `offload` or `model.layers.0-9:recompute=full`, met by the
    plan or refused (`galv.planner.constraints`). `objective`: the fastest step, the least memory (the fastest plan that
    needs it), or the fewest device-hours a sample, for which parts of the cluster count too: the plan's cluster is then
    what it uses. `time_limit`: seconds of search after which the best plan so far is taken, with its gap.

    Raises UsageError and its kin for requests that cannot be meant, NoFeasiblePlan when nothing fits.
    """
    return plans(
        model,
        example_inputs,
        top=1,
        cluster=cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        memory=memory,
        require=require,
        forbid=forbid,
        objective=objective,
        time_limit=time_limit,
        units=units,
        opaque=opaque,
        reporter=reporter,
    )[0]


def plans(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    top: int,
    **options: Unpack[PlanOptions],
) -> tuple[Plan, ...]:
    """The `top` best plans of different layouts, best first; fewer where there are no more. Options as for `plan`."""
    from galv.planner.ask import best_plans

    number = whole_number("top", top, most=MAX_ANSWERS)
    return best_plans(_question(model, example_inputs, **options), number, options.get("reporter") or Reporter())


def pareto(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    points: int = 8,
    **options: Unpack[PlanOptions],
) -> Front:
    """Step time against memory: the fastest plans under up to `points` budgets, from the smallest budget that does to
    `memory`. Options as for `plan`."""
    from galv.planner.ask import front

    number = whole_number("points", points, least=2, most=MAX_ANSWERS)
    return front(_question(model, example_inputs, **options), number, options.get("reporter") or Reporter())


def explain(
    plan: Plan,
    unit: str,
    *,
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    example_inputs: Any = None,
) -> Why:
    """Why `unit` of `plan` has its strategy: what binds, the runner-up, and what switching to it would cost.

    The plan's model is traced and priced again; `model` and `example_inputs` are needed where the plan was made from an
    object. Raises UsageError for a unit that the plan does not have, ModelError for a model that is not the plan's.
    """
    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture.of_plan import graph_of, source_of
    from galv.planner.clusters import of_shape
    from galv.planner.why import why

    if plan.training.stack != "galv":
        raise UsageError(f"this plan prices how {plan.training.stack} would run; only plans of galv's own are searched")
    if model is None and plan.model.source is None:
        raise ModelError("this plan was made from a model object; say which: galv.explain(plan, unit, model=...)")
    cluster = of_shape(load_cluster(plan.cluster.spec), plan.cluster.devices_per_node, plan.cluster.num_nodes)
    graph = graph_of(plan, source_of(plan, model, example_inputs))
    return why(plan, FactsPricer(graph, cluster), unit)


def sweep(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    clusters: Sequence[str],
    global_batches: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerName = "adamw",
    price_per_device_hour: float | None = None,
    reporter: Reporter | None = None,
) -> Sweep:
    """The best plan for every combination of `clusters`, `seq_lens` and `global_batches`, side by side.

    Clusters may hold lists in braces, such as `h100-sxm-80:8x{1,2,4}`. Where nothing fits or divides, the point says
    why. The model is traced once for each sequence length. Other arguments as for `plan`. Raises UsageError for what
    cannot be meant at any point.
    """
    from galv.planner.ask import Question, answered
    from galv.planner.sweep import Sweep, SweepPoint, expanded

    reporter = reporter or Reporter()
    profiles = [load_cluster(one) for cluster in clusters for one in expanded(cluster)]
    if not profiles or not global_batches:
        raise UsageError(
            "a sweep needs at least one cluster and one global batch; there is no "
            + ("global batch" if profiles else "cluster")
        )
    lengths: Sequence[int | None] = seq_lens or [None]
    wanted = list(product(lengths, global_batches, profiles))
    traced: dict[tuple[int | None, Precision, str], ModelGraph] = {}
    points, name = [], ""
    for done, (seq_len, global_batch, profile) in enumerate(wanted):
        reporter.phase(f"{profile.spec}, batch {global_batch}" + (f", sequence {seq_len}" if seq_len else ""))
        reporter.progress(done, len(wanted))
        try:
            request = training_request(profile, global_batch, seq_len, precision, optimizer, None)
            key = seq_len, request.precision, profile.device.kind
            if key not in traced:
                traced[key] = captured(model, example_inputs, profile, request, Reporter(), None, ())[1].graph
            (found,) = answered(Question(pricer_of(traced[key], profile), request))
        except (NoFeasiblePlan, UsageError) as error:
            if isinstance(error, (ModelError, UnknownName)):
                raise
            reason = str(error).splitlines()[0]
            points.append(SweepPoint(profile.spec, profile.num_devices, seq_len, global_batch, reason))
            continue
        name = found.model.name
        points.append(SweepPoint.of(found, price_per_device_hour))
    return Sweep(name or str(model), tuple(points))


def capture(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    seq_len: int | None = None,
    precision: Precision = "bf16",
    device_kind: Literal["cuda", "cpu"] = "cuda",
) -> ModelGraph:
    """`model` traced once, to price many layouts of it: give the result to `estimate` in the model's place.

    Arguments as for `plan`; `device_kind` says for which kernels attention is captured.
    """
    from galv.planner.capture import capture as trace
    from galv.planner.capture.source import resolve_model

    return trace(resolve_model(model, example_inputs, seq_len=seq_len), precision=precision, device_kind=device_kind)


def estimate(
    model: str | nn.Module | Callable[[], nn.Module] | ModelGraph,
    example_inputs: Any = None,
    *,
    cluster: str | ClusterProfile,
    global_batch: int,
    micro_batch: int = 1,
    seq_len: int | None = None,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    sequence: SequenceMode | None = None,
    recompute: Recompute = "none",
    schedule: ScheduleName | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerName = "adamw",
    memory: float | str | None = None,
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
    stack: str | StackProfile | None = None,
    virtual_stages: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp_shard: int | None = None,
    dp_replicate: int | None = None,
    offload: Sequence[str] = (),
    attention: Literal["fused", "unfused"] = "fused",
) -> Plan:
    """One layout given by hand, priced: a plan that runs, whether or not the estimate says that it fits.

    All units get `zero`, all repeated blocks `recompute`; the rest of the devices are data-parallel. `sequence` None
    shards activations between tensor-parallel regions when tp > 1. With pp > 1 the units are cut where the pipeline is
    fastest; `virtual_stages` are the model chunks of a pipeline rank. `micro_batch`: samples that one data-parallel
    group processes at once. Other arguments as for `plan`.

    `cp`, with `sequence` ulysses or ring, cuts the blocks' sequence. `ep` shares experts out over data-parallel ranks,
    of which `dp_shard` shard states and `dp_replicate` replicate the shards. `offload`: what lies in the host's memory.

    `stack` prices the layout as another software runs it: the name of a shipped profile (`galv.profiles.stack`) or a
    profile. Only there is unfused `attention` known, tensor parallelism may span nodes, and blocks are cut as that
    software cuts; it knows neither `ep` nor `offload`, and shards over all data-parallel ranks.

    Raises UsageError when the sizes do not divide, naming what would, and for what galv's runtime does not run.
    """
    from galv.planner.by_hand import Layout, priced_by_hand
    from galv.planner.by_stack import StackExtras, priced_by_stack

    profile = cluster_profile(cluster)
    request = training_request(profile, global_batch, seq_len, precision, optimizer, memory)
    check_name("recompute level", recompute, Recompute)
    check_name("schedule", schedule or "none", ScheduleName)
    check_name("sequence mode", sequence or "none", SequenceMode)
    degrees = {"tp": tp, "pp": pp, "micro_batch": micro_batch, "cp": cp, "ep": ep, "virtual_stages": virtual_stages}
    optional = {"dp_shard": dp_shard, "dp_replicate": dp_replicate}
    layout = Layout(
        zero=whole_number("zero", zero, least=0),
        sequence=sequence,
        recompute=recompute,
        schedule=schedule,
        offload=offload_of(offload),
        **{name: whole_number(name, value) for name, value in degrees.items()},
        **{name: whole_number(name, value) for name, value in optional.items() if value is not None},
    )
    if stack is not None:
        extras = StackExtras(virtual_stages=virtual_stages, context=cp, fused_attention=attention == "fused")
        known = load_stack(stack) if isinstance(stack, str) else stack
        traced = model if isinstance(model, ModelGraph) else _graph(model, example_inputs, profile, request)
        return priced_by_stack(traced, profile, known, layout, extras, request)
    if attention != "fused":
        raise UsageError("unfused attention is priced for a stack only; galv runs what the model calls")
    layout.check(profile, request)
    if isinstance(model, ModelGraph):
        return priced_by_hand(pricer_of(model, profile), layout, request, source=None, inputs_source=None)
    source, shared = captured(model, example_inputs, profile, request, Reporter(), units, opaque)
    return priced_by_hand(shared, layout, request, source=source.source, inputs_source=source.inputs_source)


def graph(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    seq_len: int | None = None,
    micro_batch: int = 1,
    precision: Precision = "bf16",
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
) -> GraphReport:
    """How galv takes `model` apart: unit classes with their FLOPs and bytes, the chain, and what flows between units.

    `print` shows it as a table; `to_json()` and `to_dot()` are for other programs. `micro_batch`: samples that are
    counted for, as a GPU runs them. Other arguments as for `plan`. Raises ModelError when the model cannot be followed.
    """
    from galv.planner.capture import capture
    from galv.planner.capture.report import report
    from galv.planner.capture.source import resolve_model

    micro_batch = whole_number("micro_batch", micro_batch, most=MAX_GLOBAL_BATCH)
    seq_len = None if seq_len is None else whole_number("seq_len", seq_len, most=MAX_SEQ_LEN)
    check_name("precision", precision, Precision)
    check_patterns("units", units or ())
    check_patterns("opaque", opaque)
    source = resolve_model(model, example_inputs, seq_len=seq_len)
    found = capture(source, precision=precision, units=units, opaque=opaque)
    return report(found, micro_batch=micro_batch, seq_len=source.seq_len, precision=precision)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    device: Any = None,
    seed: int = 0,
    weights: Weights | None = None,
    targets: str | None = None,
) -> ParallelModule:
    """`model` made parallel under `plan`, to be called on every rank of an initialized process group.

    A model on the meta device is initialized shard by shard, the same for every plan with the same `seed`; a model
    with real weights keeps them. `weights` are full tensors by name to take instead, or a function that gives the one
    of a name (`galv.open_weights(FOLDER)` reads safetensors). No rank ever holds more than its shard and one unit.

    The loss that the model returns must be a mean over its samples or over its valid targets, those that are not -100:
    a sum would train to something else than on one device. `targets` names the integer input that holds the targets;
    not needed where it is called `labels`, `label`, `targets`, `target` or `lm_labels`.

    Raises RunError when the world size is not the plan's, UsageError when the model or the name of its targets is not.
    """
    from galv.planner.capture.glue import glue_for
    from galv.planner.capture.of_plan import fingerprint_of
    from galv.runtime.parallelize import parallelize as apply

    if plan.training.stack != "galv":
        raise UsageError(f"this plan prices how {plan.training.stack} would run; make one without a stack to run it")
    return apply(
        model,
        plan,
        glue=lambda num_samples: glue_for(model, plan, num_samples),
        device=device,
        seed=seed,
        weights=weights,
        targets=targets,
        fingerprint=fingerprint_of(model, plan),
    )


def check(
    plan: Plan,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    example_inputs: Any = None,
    *,
    rank: int | None = None,
    all_stages: bool = False,
) -> Check:
    """The plan's training step as one rank runs it at the plan's full world size, beside the plan's estimate.

    The real runtime runs on one CPU, with tensors that have no memory and collectives that return at once: what it
    holds, byte by byte, and every collective that it calls. `rank` is by default the first one of the fullest stage;
    `all_stages` runs the first rank of each. `model` and `example_inputs` are needed where the plan was made from an
    object. Raises ModelError when the model is not the plan's, UsageError for a rank that the plan has not.
    """
    from galv.cost_models.collectives import step_collectives
    from galv.planner.capture.attention import fused_attention
    from galv.planner.capture.glue import glue_for
    from galv.planner.capture.of_plan import fingerprint_of, graph_of, source_of
    from galv.runtime.check_report import compared
    from galv.runtime.dry_run import dry_run

    if plan.training.stack != "galv":
        raise UsageError(f"this plan prices how {plan.training.stack} would run, which galv cannot check")
    if rank is not None and all_stages:
        raise UsageError("check one rank or one of every stage, not both")
    source = source_of(plan, model, example_inputs)
    per_stage = plan.num_devices // plan.pipeline.degree
    fullest = max(range(plan.pipeline.degree), key=lambda stage: plan.estimate.peak_bytes[stage])
    chosen = fullest * per_stage if rank is None else whole_number("rank", rank, least=0)
    runs = [
        dry_run(
            source.build,
            plan,
            each,
            glue=lambda model, num_samples: glue_for(model, plan, num_samples),
            fingerprint=lambda model: fingerprint_of(model, plan),
            kernels=lambda: fused_attention(plan.cluster.kind),
        )
        for each in (range(0, plan.num_devices, per_stage) if all_stages else [chosen])
    ]
    graph = graph_of(plan, source)
    return compared(plan, runs, {run.stage: step_collectives(plan, graph, run.stage) for run in runs})


def build_model(plan: Plan) -> nn.Module:
    """The model that `plan` was made for, on the meta device.

    Raises ModelError when it was planned from an object, and when its inputs are no longer those of the plan.
    """
    from galv.planner.capture.of_plan import source_of

    return source_of(plan).build()


# ----------------------------------------------------------------------------------------------- inside


def _question(
    model: Any,
    example_inputs: Any,
    *,
    cluster: str | ClusterProfile,
    global_batch: int,
    seq_len: int | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerName = "adamw",
    memory: float | str | None = None,
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    objective: Objective = "throughput",
    time_limit: float | None = None,
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Question:
    """What `plan` is asked, its arguments read and its model traced."""
    from galv.planner.ask import Question
    from galv.planner.planner import Objective
    from galv.planner.tables import Limits

    profile = cluster_profile(cluster)
    request = training_request(profile, global_batch, seq_len, precision, optimizer, memory)
    check_name("objective", objective, Objective)
    limits = Limits(constraints=constraints_of(require, forbid))
    seconds = seconds_limit(time_limit)
    source, shared = captured(model, example_inputs, profile, request, reporter or Reporter(), units, opaque)
    return Question(
        shared,
        request,
        source=source.source,
        inputs_source=source.inputs_source,
        limits=limits,
        objective=objective,
        time_limit_seconds=seconds,
    )


def _graph(model: Any, example_inputs: Any, cluster: ClusterProfile, request: Request) -> ModelGraph:
    return capture(
        model,
        example_inputs,
        seq_len=request.seq_len,
        precision=request.precision,
        device_kind=cluster.device.kind,
    )


__all__ = [
    "build_model", "capture", "check", "estimate", "explain", "graph", "parallelize", "pareto", "plan", "plans", "sweep"
]  # fmt: skip
