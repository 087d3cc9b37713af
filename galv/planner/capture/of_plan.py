"""Finds a plan's model again: from its name or from an object, and only if it still is that model."""

from __future__ import annotations

from typing import Any

from torch import nn

from galv.errors import ModelError
from galv.planner.capture.fingerprint import fingerprint_as
from galv.planner.capture.inputs import input_specs
from galv.planner.capture.model_graph import capture
from galv.planner.capture.source import ModelSource, resolve_model
from galv.planner.graph import ModelGraph, UnitRef
from galv.planner.plan import InputSpec, Plan


def source_of(plan: Plan, model: Any = None, example_inputs: Any = None) -> ModelSource:
    """Where the plan's model comes from. Raises ModelError when its inputs are no longer those of the plan."""
    if model is None and plan.model.source is None:
        raise ModelError(
            "this plan was made from a model object, so only a script that has the model can run it: "
            "galv run PLAN SCRIPT, with galv.parallelize(model, plan) in the script, or galv.check(plan, model, "
            "example_inputs)"
        )
    seq_len = plan.training.seq_len
    if model is None:
        source = resolve_model(str(plan.model.source), plan.model.inputs_source, seq_len=seq_len)
    else:
        source = resolve_model(model, example_inputs, seq_len=seq_len)
    _check_inputs(source, plan)
    return source


def graph_of(plan: Plan, source: ModelSource) -> ModelGraph:
    """The plan's model, captured with the plan's units. Raises ModelError when it is another model."""
    blocks = [unit.modules[0] for unit in plan.units() if unit.is_block and len(unit.modules) == 1]
    opaque = [unit.modules[0] for unit in plan.units() if unit.is_opaque]
    wishes: list[dict[str, Any]] = [{}, {"units": blocks or None, "opaque": opaque}]
    for wish in wishes:
        graph = capture(source, precision=plan.training.precision, device_kind=plan.cluster.kind, **wish)
        if graph.fingerprint == plan.model.fingerprint:
            return graph
    raise ModelError(f"the plan was made for another model than this {source.name}; plan again for this model")


def fingerprint_of(model: nn.Module, plan: Plan) -> str | None:
    """The fingerprint of `model` with the units of `plan`; None when it lacks one of their modules."""
    units = [UnitRef(unit.name, unit.unit_class, unit.modules, unit.parameters) for unit in plan.units()]
    return fingerprint_as(model, units)


# ----------------------------------------------------------------------------------------------- inputs


def _check_inputs(source: ModelSource, plan: Plan) -> None:
    """Nothing when the inputs of `source` are those that `plan` describes."""
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
