"""The Python front door: plan a model, price a layout, run a plan. Everything here is also `galv.<name>`.

Planning imports torch only to trace the model; the search and the cost models are plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

from galv.errors import ModelError, NoFeasiblePlan, UnknownName, UsageError
from galv.planner.graph import ModelGraph
from galv.planner.plan import (
    MAX_GLOBAL_BATCH,
    MAX_SEQ_LEN,
    Offload,
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

if TYPE_CHECKING:
    from torch import nn

    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture.report import GraphReport
    from galv.planner.capture.source import ModelSource
    from galv.planner.space import Request
    from galv.planner.sweep import Sweep
    from galv.runtime.check_report import Check
    from galv.runtime.materialize import Weights
    from galv.runtime.module import ParallelModule

GIB = 2**30


def plan(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any = None,
    *,
    cluster: str | ClusterProfile,
    global_batch: int,
    seq_len: int | None = None,
    precision: Precision | None = None,
    optimizer: OptimizerName = "adamw",
    memory: float | None = None,
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> Plan:
    """The fastest plan found for training `model` on `cluster`, proven optimal in the searched space or with its gap.

    `model`: a path to a Hugging Face config, `hf:NAME`, `package.module:factory`, a module (on the meta device to save
    memory) or a function that builds one. `example_inputs`: tensors by keyword, a tuple, one tensor, or a function of
    the number of samples that returns such; `package.module:function` as text; not needed for language models from
    Hugging Face configs, which take `seq_len` tokens a sample. `global_batch`: samples of one optimizer step over all
    devices. `precision`: None takes bf16 on a GPU that has it, else fp32. `memory`: GiB that one device may hold,
    all of it when None. `units`: patterns of module names that are to be units, in place of what structure shows.
    `opaque`: patterns of modules that are not traced, each one unit held whole. `reporter` hears of the progress.

    Raises UsageError and its kin for requests that cannot be meant, NoFeasiblePlan when nothing fits.
    """
    from galv.planner.assemble import assemble
    from galv.planner.habits import alternatives
    from galv.planner.planner import best_plan
    from galv.planner.space import candidates

    reporter = reporter or Reporter()
    profile = _cluster(cluster)
    request = _request(profile, global_batch, seq_len, precision, optimizer, memory)
    source, shared = _captured(model, example_inputs, profile, request, reporter, units, opaque)
    found = candidates(shared.graph, profile, request)
    answer = best_plan(shared, found, request.budget_bytes, reporter=reporter)
    return assemble(
        answer.priced,
        answer.solution,
        request,
        source=source.source,
        inputs_source=source.inputs_source,
        alternatives=alternatives(shared, request),
        search=answer.report,
    )


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
    why. Other arguments as for `plan`. Raises UsageError for what cannot be meant at any point.
    """
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
    points, name = [], ""
    for done, (seq_len, global_batch, profile) in enumerate(wanted):
        reporter.phase(f"{profile.spec}, batch {global_batch}" + (f", sequence {seq_len}" if seq_len else ""))
        reporter.progress(done, len(wanted))
        try:
            found = plan(
                model,
                example_inputs,
                cluster=profile,
                global_batch=global_batch,
                seq_len=seq_len,
                precision=precision,
                optimizer=optimizer,
            )
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
    memory: float | None = None,
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

    profile = _cluster(cluster)
    request = _request(profile, global_batch, seq_len, precision, optimizer, memory)
    _check_name("recompute level", recompute, Recompute)
    _check_name("schedule", schedule or "none", ScheduleName)
    _check_name("sequence mode", sequence or "none", SequenceMode)
    degrees = {"tp": tp, "pp": pp, "micro_batch": micro_batch, "cp": cp, "ep": ep, "virtual_stages": virtual_stages}
    optional = {"dp_shard": dp_shard, "dp_replicate": dp_replicate}
    layout = Layout(
        zero=_whole("zero", zero, least=0),
        sequence=sequence,
        recompute=recompute,
        schedule=schedule,
        offload=_offload(offload),
        **{name: _whole(name, value) for name, value in degrees.items()},
        **{name: _whole(name, value) for name, value in optional.items() if value is not None},
    )
    if stack is not None:
        extras = StackExtras(virtual_stages=virtual_stages, context=cp, fused_attention=attention == "fused")
        known = load_stack(stack) if isinstance(stack, str) else stack
        captured = model if isinstance(model, ModelGraph) else _graph(model, example_inputs, profile, request)
        return priced_by_stack(captured, profile, known, layout, extras, request)
    if attention != "fused":
        raise UsageError("unfused attention is priced for a stack only; galv runs what the model calls")
    layout.check(profile, request)
    if isinstance(model, ModelGraph):
        return priced_by_hand(_pricer(model, profile), layout, request, source=None, inputs_source=None)
    source, shared = _captured(model, example_inputs, profile, request, Reporter(), units, opaque)
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

    micro_batch = _whole("micro_batch", micro_batch, most=MAX_GLOBAL_BATCH)
    seq_len = None if seq_len is None else _whole("seq_len", seq_len, most=MAX_SEQ_LEN)
    _check_name("precision", precision, Precision)
    _patterns("units", units or ())
    _patterns("opaque", opaque)
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
    chosen = fullest * per_stage if rank is None else _whole("rank", rank, least=0)
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


def _cluster(cluster: str | ClusterProfile) -> ClusterProfile:
    if isinstance(cluster, ClusterProfile):
        return cluster
    if not isinstance(cluster, str):
        raise UsageError(f"cluster must be text such as 'h100-sxm-80:8x4' or a ClusterProfile, not {cluster!r}")
    return load_cluster(cluster)


def _check_name(kind: str, name: str, valid: Any) -> None:
    if not isinstance(name, str):
        raise UsageError(f"the {kind} must be one of {', '.join(get_args(valid))}, not {name!r}")
    if name not in get_args(valid):
        raise UnknownName(kind, name, get_args(valid))


def _whole(argument: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value` as an int, also when it is one of numpy's. Raises UsageError naming the argument."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise UsageError(f"{argument} must be a whole number, not {value!r}")
    if number < least:
        raise UsageError(f"{argument} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise UsageError(f"{argument} can be at most {most}, not {number}")
    return number


def _request(
    cluster: ClusterProfile,
    global_batch: int,
    seq_len: int | None,
    precision: Precision | None,
    optimizer: OptimizerName,
    memory: float | None,
) -> Request:
    """The training request, checked against the device."""
    from galv.planner.space import Request

    global_batch = _whole("global_batch", global_batch, most=MAX_GLOBAL_BATCH)
    seq_len = None if seq_len is None else _whole("seq_len", seq_len, most=MAX_SEQ_LEN)
    _check_name("optimizer", optimizer, OptimizerName)
    _check_name("precision", precision or "bf16", Precision)
    device = cluster.device
    chosen: Precision = precision or ("bf16" if device.kind == "cuda" and "bf16" in device.dtypes else "fp32")
    device.peak(chosen)
    most = device.memory_bytes / GIB
    if memory is not None and not _is_number(memory):
        raise UsageError(f"memory must be a number of GiB, not {memory!r}")
    if memory is not None and not 0 < memory <= most * (1 + 1e-9):
        raise UsageError(f"memory is per device, in GiB: {device.name} has {most:.1f}, {memory:g} was asked for")
    budget = device.memory_bytes if memory is None else round(memory * GIB)
    return Request(
        global_batch=global_batch, seq_len=seq_len, precision=chosen, optimizer=optimizer, budget_bytes=budget
    )


def _patterns(argument: str, value: Any) -> None:
    """Nothing for a collection of texts. Raises UsageError for one text, which would be read letter by letter."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) for pattern in value):
        raise UsageError(f"{argument} must be a list of patterns such as ['encoder.stages.*'], not {value!r}")


def _offload(value: Sequence[str]) -> tuple[Offload, ...]:
    """What is offloaded, sorted. Raises UsageError for a single text, UnknownName for what cannot be."""
    if isinstance(value, str):
        raise UsageError(f"offload must be a list such as ['activations'], not {value!r}")
    for what in value:
        _check_name("offload", what, Offload)
    return tuple(what for what in get_args(Offload) if what in value)  # in the order of the alphabet


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _graph(model: Any, example_inputs: Any, cluster: ClusterProfile, request: Request) -> ModelGraph:
    return capture(
        model,
        example_inputs,
        seq_len=request.seq_len,
        precision=request.precision,
        device_kind=cluster.device.kind,
    )


_PRICERS: WeakKeyDictionary[Any, dict[ClusterProfile, FactsPricer]] = WeakKeyDictionary()


def _pricer(graph: ModelGraph, cluster: ClusterProfile) -> FactsPricer:
    """What is already priced of `graph` on `cluster`, for as long as the graph lives."""
    from galv.cost_models.unit import FactsPricer

    known = _PRICERS.setdefault(graph.source, {})
    if cluster not in known:
        known[cluster] = FactsPricer(graph, cluster)
    return known[cluster]


def _captured(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    cluster: ClusterProfile,
    request: Request,
    reporter: Reporter,
    units: Sequence[str] | None,
    opaque: Sequence[str],
) -> tuple[ModelSource, FactsPricer]:
    """The traced model, ready to be priced on `cluster`."""
    reporter.phase("tracing the model")
    _patterns("units", units or ())
    _patterns("opaque", opaque)
    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture import capture
    from galv.planner.capture.source import resolve_model

    source = resolve_model(model, example_inputs, seq_len=request.seq_len)
    graph = capture(source, precision=request.precision, device_kind=cluster.device.kind, units=units, opaque=opaque)
    beside = [name for unit in graph.units for name in unit.parameters]
    if beside:
        raise ModelError(
            f"{', '.join(beside)} cannot be sharded: a parameter must lie in a module that one unit holds, and these "
            "lie directly in a module around several units; put them, and their use, into a module of their own"
        )
    return source, FactsPricer(graph, cluster)


__all__ = ["build_model", "capture", "check", "estimate", "graph", "parallelize", "plan", "sweep"]
