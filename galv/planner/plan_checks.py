"""What must hold between the parts of a plan, beyond what each part says of itself: a plan that passes can be read.

Each check yields what is wrong, with its place; `Plan` refuses itself at the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from galv.planner.layout import absolute_name

if TYPE_CHECKING:
    from galv.planner.plan import Plan, TensorParallelLayout, Unit


def faults(plan: Plan) -> Iterator[str]:
    """What is wrong with `plan`, a line each; nothing for a plan that is whole. Later checks rely on earlier ones."""
    yield from _stages(plan)
    yield from _units(plan)
    yield from _batch(plan)
    yield from _layouts(plan)
    yield from _tied(plan)
    yield from _estimate(plan)


def repeated(values: Iterable[Hashable]) -> Hashable | None:
    """The first value that occurs twice, None when all differ."""
    return next((value for value, times in Counter(values).items() if times > 1), None)


def _stages(plan: Plan) -> Iterator[str]:
    pipeline = plan.pipeline
    runs = plan.training.stack == "galv"
    if runs and pipeline.schedule in ("interleaved", "zb-h1", "zbv"):
        yield f"pipeline.schedule: galv does not run {pipeline.schedule!r}"
    if pipeline.virtual_stages != 1 and runs:
        yield f"pipeline.virtual_stages: plans that galv runs have 1, not {pipeline.virtual_stages}"
    if len(plan.stages) != pipeline.degree * pipeline.virtual_stages:
        yield f"stages: {len(plan.stages)} stages for {pipeline.degree} pipeline ranks"
    if not all(stage.units for stage in plan.stages):
        yield "stages: a stage without units"
    if (pipeline.degree == 1) != (pipeline.schedule == "none"):
        yield (
            f"pipeline: schedule {pipeline.schedule!r} for degree {pipeline.degree}; it is 'none' exactly when the "
            "degree is 1"
        )


def _units(plan: Plan) -> Iterator[str]:
    twice = repeated(unit.name for unit in plan.units())
    if twice is not None:
        yield f"stages: two units are named {twice!r}"
    per_stage = plan.num_devices // plan.pipeline.degree
    first = next(plan.units()).strategy
    for unit in plan.units():
        strategy = unit.strategy
        if strategy.num_devices * plan.pipeline.degree != plan.num_devices:
            yield f"unit {unit.name}: {strategy} covers {strategy.num_devices} devices of {per_stage}"
        if plan.training.stack == "galv":
            yield from _not_run(unit)
        if strategy.tp != first.tp:
            yield f"unit {unit.name}: tp {strategy.tp} beside units with tp {first.tp}; all units share one degree"


def _not_run(unit: Unit) -> Iterator[str]:
    """What of a unit's strategy the runtime cannot run."""
    strategy = unit.strategy
    if strategy.cp > 1:
        yield f"unit {unit.name}: galv does not run context parallelism (cp {strategy.cp})"
    if strategy.zero and strategy.dp_replicate > 1:
        yield f"unit {unit.name}: galv does not run hybrid sharding (dp_replicate {strategy.dp_replicate})"
    if strategy.ep > 1:
        yield f"unit {unit.name}: galv does not run expert parallelism (ep {strategy.ep})"
    if "parameters" in strategy.offload and strategy.zero != 3:
        yield (
            f"unit {unit.name}: parameters are offloaded under zero 3 only, not zero {strategy.zero}, where a copy of "
            "them stays on the device; offload 'optimizer' there"
        )
    elif strategy.zero == 3 and ("parameters" in strategy.offload) != ("optimizer" in strategy.offload):
        yield (
            f"unit {unit.name}: under zero 3 the optimizer's masters are the parameters; offload both or neither, not "
            f"{', '.join(strategy.offload)}"
        )


def _batch(plan: Plan) -> Iterator[str]:
    training = plan.training
    if plan.micro_batch * training.num_microbatches * plan.data_parallel_degree != training.global_batch:
        yield (
            f"training: global batch {training.global_batch} is not microbatch x {training.num_microbatches} "
            f"microbatches x {plan.data_parallel_degree} data-parallel groups"
        )


def _layouts(plan: Plan) -> Iterator[str]:
    twice = repeated((layout.unit_class, layout.degree, layout.sequence) for layout in plan.layouts)
    if twice is not None:
        yield f"layouts: two layouts for {twice}"
    for unit in plan.units():
        layout = plan.layout_of(unit)
        if unit.strategy.tp > 1 and layout is None and plan.training.stack == "galv":
            yield f"unit {unit.name}: no layout for tp {unit.strategy.tp}"
        if layout is not None:
            yield from _names_within(unit, layout)


def _names_within(unit: Unit, layout: TensorParallelLayout) -> Iterator[str]:
    named = [module.module for module in layout.modules] + [local.module for local in layout.local_arguments]
    for name in named:
        if not _is_within(unit, name):
            yield f"layouts: {name!r} is no module of unit {unit.name}"


def _is_within(unit: Unit, relative: str) -> bool:
    try:
        absolute_name(unit.modules, relative)
    except (ValueError, IndexError):
        return False
    return True


def _tied(plan: Plan) -> Iterator[str]:
    units = list(plan.units())
    for index, group in enumerate(plan.model.tied):
        for name in group:
            if not any(_owns(unit, name) for unit in units):
                yield f"model.tied.{index}: no unit holds {name!r}"


def _owns(unit: Unit, parameter: str) -> bool:
    return parameter in unit.parameters or any(
        not module or parameter.startswith(f"{module}.") for module in unit.modules
    )


def _estimate(plan: Plan) -> Iterator[str]:
    # Of interleaved chunks each device holds several; the estimate is of devices.
    degree = plan.pipeline.degree
    for name, found in (("peak_bytes", len(plan.estimate.peak_bytes)), ("stages", len(plan.estimate.stages))):
        if found != degree:
            yield f"estimate.{name}: {found} for {degree} stages"
    for index, priced in enumerate(plan.estimate.stages[:degree]):
        num_units = len(plan.units_of_rank(index))
        if num_units != len(priced.units):
            yield f"estimate.stages.{index}.units: {len(priced.units)} for {num_units} units"
