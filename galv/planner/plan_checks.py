"""What must hold between the parts of a plan, beyond what each part says of itself: a plan that passes can be read.

Each check yields what is wrong, with its place; `Plan` refuses itself at the first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from galv.planner.layout import absolute_name

if TYPE_CHECKING:
    from galv.planner.plan import Plan, ScheduleName, TensorParallelLayout, Unit


def faults(plan: Plan) -> Iterator[str]:
    """What is wrong with `plan`, a line each; nothing for a plan that is whole. Later checks rely on earlier ones."""
    yield from _stages(plan)
    yield from _units(plan)
    yield from _batch(plan)
    yield from _layouts(plan)
    yield from _experts(plan)
    yield from _tied(plan)
    yield from _estimate(plan)


def repeated(values: Iterable[Hashable]) -> Hashable | None:
    """The first value that occurs twice, None when all differ."""
    return next((value for value, times in Counter(values).items() if times > 1), None)


def _stages(plan: Plan) -> Iterator[str]:
    pipeline = plan.pipeline
    if pipeline.virtual_stages not in virtual_stages_of(pipeline.schedule):
        yield f"pipeline.virtual_stages: not {pipeline.virtual_stages} under schedule {pipeline.schedule!r}"
    if len(plan.stages) != pipeline.degree * pipeline.virtual_stages:
        yield f"stages: {len(plan.stages)} stages for {pipeline.degree} pipeline ranks"
    if not all(stage.units for stage in plan.stages):
        yield "stages: a stage without units"
    if (pipeline.degree == 1) != (pipeline.schedule == "none"):
        yield (
            f"pipeline: schedule {pipeline.schedule!r} for degree {pipeline.degree}; it is 'none' exactly when the "
            "degree is 1"
        )


def virtual_stages_of(schedule: ScheduleName) -> range:
    """How many chunks of the model each pipeline rank may hold under `schedule`."""
    if schedule == "interleaved":
        return range(2, 2**20)
    return range(2, 3) if schedule == "zbv" else range(1, 2)


def _units(plan: Plan) -> Iterator[str]:
    twice = repeated(unit.name for unit in plan.units())
    if twice is not None:
        yield f"stages: two units are named {twice!r}"
    per_stage = plan.num_devices // plan.pipeline.degree
    for unit in plan.units():
        strategy = unit.strategy
        if strategy.num_devices * plan.pipeline.degree != plan.num_devices:
            yield f"unit {unit.name}: {strategy} covers {strategy.num_devices} devices of {per_stage}"
        if plan.training.stack == "galv":
            yield from _not_run(unit)
            yield from _context(plan, unit)


def _not_run(unit: Unit) -> Iterator[str]:
    """What of a unit's strategy the runtime cannot run."""
    strategy = unit.strategy
    if strategy.ep > 1 and strategy.cp > 1:
        yield f"unit {unit.name}: galv does not run expert parallelism beside a context axis ({strategy})"
    if strategy.ep > 1 and strategy.dp_shard % strategy.ep and strategy.ep % strategy.dp_shard:
        yield f"unit {unit.name}: ep {strategy.ep} neither divides dp_shard {strategy.dp_shard} nor is a multiple of it"
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


def _context(plan: Plan, unit: Unit) -> Iterator[str]:
    """What is wrong with a unit's context axis."""
    strategy = unit.strategy
    if strategy.cp == 1:
        return
    if not unit.is_block:
        yield f"unit {unit.name}: cp {strategy.cp}; only repeated blocks have their sequence cut over a context axis"
    elif strategy.sequence not in ("ulysses", "ring"):
        yield f"unit {unit.name}: cp {strategy.cp} with sequence {strategy.sequence!r}; it needs 'ulysses' or 'ring'"
    elif plan.sequence_layout_of(unit) is None:
        yield f"unit {unit.name}: no sequence layout for {strategy.sequence} over {strategy.cp} ranks"


def _batch(plan: Plan) -> Iterator[str]:
    training = plan.training
    for degree in plan.data_degrees:
        if plan.samples_at(degree) * training.num_microbatches * degree != training.global_batch:
            yield (
                f"training: global batch {training.global_batch} is not microbatch x {training.num_microbatches} "
                f"microbatches x {degree} data-parallel groups"
            )


def _layouts(plan: Plan) -> Iterator[str]:
    twice = repeated((layout.unit_class, layout.degree, layout.sequence) for layout in plan.layouts)
    if twice is not None:
        yield f"layouts: two layouts for {twice}"
    twice = repeated((layout.unit_class, layout.degree, layout.mode) for layout in plan.sequence_layouts)
    if twice is not None:
        yield f"sequence_layouts: two layouts for {twice}"
    seen = set()  # units of one class have as many modules, and so the same names within them
    for unit in plan.units():
        key = (unit.unit_class, unit.strategy.tp, unit.strategy.sequence, len(unit.modules))
        if key in seen:
            continue
        seen.add(key)
        layout = plan.layout_of(unit)
        if unit.strategy.tp > 1 and layout is None and plan.training.stack == "galv":
            yield f"unit {unit.name}: no layout for tp {unit.strategy.tp}"
        if layout is not None:
            yield from _names_within(unit, layout)


def _experts(plan: Plan) -> Iterator[str]:
    twice = repeated(layout.unit_class for layout in plan.experts)
    if twice is not None:
        yield f"experts: two layouts for {twice}"
    for unit in plan.units() if plan.training.stack == "galv" else ():
        layout, degree = plan.experts_of(unit), unit.strategy.ep
        if degree == 1:
            continue
        if layout is None:
            yield f"unit {unit.name}: nothing says where its experts are, for ep {degree}"
        elif len(unit.modules) != 1:
            yield f"unit {unit.name}: only repeated blocks of one module share their experts out"
        elif layout.num_experts % degree:
            yield f"unit {unit.name}: its {layout.num_experts} experts cannot be shared by ep {degree} ranks"


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
    if plan.training.stack == "galv":
        yield from _unlike_ties(plan)


def _unlike_ties(plan: Plan) -> Iterator[str]:
    """Units of one stage that share a tensor but cut it in other ways: it is one tensor there."""
    for group, stage in itertools.product(plan.model.tied, plan.stages):
        units = [unit for unit in stage.units if any(_owns(unit, name) for name in group)]
        for unit in units[1:]:
            ours, first = unit.strategy, units[0].strategy
            if (ours.tp, ours.cp, ours.sequence) != (first.tp, first.cp, first.sequence):
                yield (
                    f"unit {unit.name}: {ours} beside {first} of unit {units[0].name}, which is tied to it "
                    f"({', '.join(group)}) on one stage; give both one tp and sequence mode, or put them on two stages"
                )


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
