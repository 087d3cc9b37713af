"""The Python front door: plan a model, price a layout, run a plan. Everything here is also `galv.<name>`.

Planning imports torch only to trace the model; the search and the cost models are plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from galv.errors import ModelError, UsageError
from galv.planner.graph import ModelGraph
from galv.planner.plan import InputSpec, OptimizerName, Plan, Precision, Recompute, ScheduleName, SequenceMode
from galv.planner.reporter import Reporter
from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.stack import StackProfile, load_stack

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture.source import ModelSource
    from galv.planner.space import Request
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
    reporter: Reporter | None = None,
) -> Plan:
    """The fastest plan found for training `model` on `cluster`, proven optimal in the searched space or with its gap.

    `model`: a path to a Hugging Face config, `hf:NAME`, `package.module:factory`, a module (on the meta device to save
    memory) or a function that builds one. `example_inputs`: tensors by keyword, a tuple, one tensor, or a function of
    the number of samples that returns such; `package.module:function` as text; not needed for language models from
    Hugging Face configs, which take `seq_len` tokens a sample. `global_batch`: samples of one optimizer step over all
    devices. `precision`: None takes bf16 where the device has it, else fp32. `memory`: GiB that one device may hold,
    all of it when None. `reporter` hears of the search's progress.

    Raises UsageError and its kin for requests that cannot be meant, NoFeasiblePlan when nothing fits.
    """
    from galv.planner.assemble import assemble
    from galv.planner.habits import alternatives
    from galv.planner.planner import best_plan
    from galv.planner.space import candidates

    reporter = reporter or Reporter()
    profile = _cluster(cluster)
    request = _request(profile, global_batch, seq_len, precision, optimizer, memory)
    source, shared = _captured(model, example_inputs, profile, request, reporter)
    found = candidates(shared.graph, profile, request)
    answer = best_plan(shared, found, request.budget_bytes, reporter=reporter)
    return assemble(
        answer.priced,
        answer.solution,
        request,
        source=source.source,
        inputs_source=source.inputs_source,
        alternatives=alternatives(shared, found, request.budget_bytes),
        search=answer.report,
    )


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
    stack: str | StackProfile | None = None,
    virtual_stages: int = 1,
    cp: int = 1,
    attention: Literal["fused", "unfused"] = "fused",
) -> Plan:
    """One layout given by hand, priced: a plan that runs, whether or not the estimate says that it fits.

    All units get `zero`, all repeated blocks `recompute`; the rest of the devices are data-parallel. `sequence` None
    shards activations between tensor-parallel regions when tp > 1. With pp > 1 the units are cut where the pipeline is
    fastest. `micro_batch`: samples that one data-parallel group processes at once. Other arguments as for `plan`.

    `stack` prices the layout as another software runs it: the name of a shipped profile (`galv.profiles.stack`) or a
    profile. Only there are `virtual_stages` (model chunks of a pipeline rank, interleaved), `cp` (context-parallel
    degree) and unfused `attention` known, tensor parallelism may span nodes, and blocks are cut as that software cuts.

    Raises UsageError when the sizes do not divide, naming what would.
    """
    from galv.planner.by_hand import Layout, priced_by_hand
    from galv.planner.by_stack import StackExtras, priced_by_stack

    profile = _cluster(cluster)
    request = _request(profile, global_batch, seq_len, precision, optimizer, memory)
    layout = Layout(
        tp=tp, pp=pp, zero=zero, micro_batch=micro_batch, sequence=sequence, recompute=recompute, schedule=schedule
    )
    extras = StackExtras(virtual_stages=virtual_stages, context=cp, fused_attention=attention == "fused")
    if stack is not None:
        known = load_stack(stack) if isinstance(stack, str) else stack
        graph = model if isinstance(model, ModelGraph) else _graph(model, example_inputs, profile, request)
        return priced_by_stack(graph, profile, known, layout, extras, request)
    if extras != StackExtras():
        raise UsageError("virtual_stages, cp and unfused attention are priced for a stack only; galv runs none of them")
    layout.check(profile, request)
    if isinstance(model, ModelGraph):
        return priced_by_hand(_pricer(model, profile), layout, request, source=None, inputs_source=None)
    source, shared = _captured(model, example_inputs, profile, request, Reporter())
    return priced_by_hand(shared, layout, request, source=source.source, inputs_source=source.inputs_source)


def parallelize(model: nn.Module, plan: Plan, *, device: Any = None, seed: int = 0) -> ParallelModule:
    """`model` made parallel under `plan`, to be called on every rank of an initialized process group.

    A model on the meta device is initialized shard by shard, the same for every plan with the same `seed`; a model
    with real weights keeps them. No rank ever holds more than its shard and one unit. Raises UsageError when the world
    size or the model is not the plan's.
    """
    from galv.runtime.parallelize import parallelize as apply

    if plan.training.stack != "galv":
        raise UsageError(f"this plan prices how {plan.training.stack} would run; make one without a stack to run it")
    glue = _glue(model, plan) if plan.pipeline.degree > 1 else None
    return apply(model, plan, glue=glue, device=device, seed=seed, fingerprint=_fingerprint(model, plan))


def build_model(plan: Plan) -> nn.Module:
    """The model that `plan` was made for, on the meta device. Raises ModelError when it was planned from an object."""
    from galv.planner.capture.source import resolve_model

    if plan.model.source is None:
        raise ModelError(
            "this plan was made from a model object, so only a script that has the model can run it: "
            "galv run PLAN SCRIPT, with galv.parallelize(model, plan) in the script"
        )
    source = resolve_model(plan.model.source, plan.model.inputs_source, seq_len=plan.training.seq_len)
    return source.build()


# ----------------------------------------------------------------------------------------------- inside


def _cluster(cluster: str | ClusterProfile) -> ClusterProfile:
    return load_cluster(cluster) if isinstance(cluster, str) else cluster


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

    for name, value in (("global batch", global_batch), ("sequence length", 1 if seq_len is None else seq_len)):
        if value < 1:
            raise UsageError(f"the {name} must be at least 1, not {value}")
    device = cluster.device
    chosen: Precision = precision or ("bf16" if "bf16" in device.dtypes else "fp32")
    device.peak(chosen)
    most = device.memory_bytes / GIB
    if memory is not None and not 0 < memory <= most * (1 + 1e-9):
        raise UsageError(f"memory is per device, in GiB: {device.name} has {most:.1f}, {memory:g} was asked for")
    budget = device.memory_bytes if memory is None else round(memory * GIB)
    return Request(
        global_batch=global_batch, seq_len=seq_len, precision=chosen, optimizer=optimizer, budget_bytes=budget
    )


def _fingerprint(model: nn.Module, plan: Plan) -> str | None:
    """The fingerprint of `model` with the units of `plan`; None when it lacks one of their modules."""
    from galv.planner.capture.model_graph import fingerprint_as
    from galv.planner.graph import UnitRef

    return fingerprint_as(model, [UnitRef(unit.name, unit.unit_class, unit.modules) for unit in plan.units()])


def _glue(model: nn.Module, plan: Plan) -> fx.GraphModule:
    """The forward of `model` around the units of `plan`, for one microbatch."""
    import torch

    from galv.planner.capture.glue import trace_glue

    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    names = [name for unit in plan.units() for name in unit.modules]
    inputs = {spec.name: _meta_input(spec, plan.micro_batch) for spec in plan.model.inputs}
    return trace_glue(model, names, inputs, dtype=dtypes[plan.training.precision])


def _meta_input(spec: InputSpec, num_samples: int) -> Tensor:
    import torch

    shape = list(spec.shape)
    if spec.batch_dim is not None:
        shape[spec.batch_dim] = num_samples
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")


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
) -> tuple[ModelSource, FactsPricer]:
    """The traced model, ready to be priced on `cluster`."""
    reporter.phase("tracing the model")
    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture import capture
    from galv.planner.capture.source import resolve_model

    source = resolve_model(model, example_inputs, seq_len=request.seq_len)
    graph = capture(source, precision=request.precision, device_kind=cluster.device.kind)
    return source, FactsPricer(graph, cluster)


__all__ = ["build_model", "capture", "estimate", "parallelize", "plan"]
