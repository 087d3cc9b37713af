"""The model behind a request: traced and ready to be priced, or held against the plan that was made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from galv.arguments import check_patterns
from galv.errors import ModelError
from galv.planner.graph import ModelGraph
from galv.planner.plan import Plan
from galv.planner.reporter import Reporter
from galv.profiles.cluster import ClusterProfile

if TYPE_CHECKING:
    from torch import nn

    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture.source import ModelSource
    from galv.planner.plan import InputSpec
    from galv.planner.space import Request


def captured(
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
    check_patterns("units", units or ())
    check_patterns("opaque", opaque)
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


_PRICERS: WeakKeyDictionary[Any, dict[ClusterProfile, FactsPricer]] = WeakKeyDictionary()


def pricer_of(graph: ModelGraph, cluster: ClusterProfile) -> FactsPricer:
    """What is already priced of `graph` on `cluster`, for as long as the graph lives."""
    from galv.cost_models.unit import FactsPricer

    known = _PRICERS.setdefault(graph.source, {})
    if cluster not in known:
        known[cluster] = FactsPricer(graph, cluster)
    return known[cluster]


def check_inputs(source: ModelSource, plan: Plan) -> None:
    """Nothing when the inputs of `source` are those that `plan` describes."""
    from galv.planner.capture.inputs import input_specs

    found = input_specs(source.example, plan.model.num_samples, source.limits)
    if [_form(spec) for spec in found] != [_form(spec) for spec in plan.model.inputs]:
        raise ModelError(
            f"{source.name} takes {', '.join(map(_described, found))}, but the plan is for "
            f"{', '.join(map(_described, plan.model.inputs))}; plan again"
        )
    for spec in plan.model.inputs:
        limit = source.limits.get(spec.name)
        if limit is not None and (spec.high or 0) > limit:
            raise ModelError(f"input {spec.name} of {source.name} is below {limit}, but the plan says {spec.high}")


def _form(spec: InputSpec) -> tuple[Any, ...]:
    return spec.name, spec.shape, spec.dtype, spec.batch_dim


def _described(spec: InputSpec) -> str:
    samples = "the same for all samples" if spec.batch_dim is None else f"samples along dim {spec.batch_dim}"
    return f"{spec.name} {spec.dtype} {spec.shape} ({samples})"


def fingerprint_of(model: nn.Module, plan: Plan) -> str | None:
    """The fingerprint of `model` with the units of `plan`; None when it lacks one of their modules."""
    from galv.planner.capture.fingerprint import fingerprint_as
    from galv.planner.graph import UnitRef

    units = [UnitRef(unit.name, unit.unit_class, unit.modules, unit.parameters) for unit in plan.units()]
    return fingerprint_as(model, units)
