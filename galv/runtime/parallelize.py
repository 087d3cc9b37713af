"""The ordered list of what is applied to a model to run it under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from galv.errors import ModelError, UnknownName
from galv.planner.plan import Layout, Plan, Unit, absolute_name
from galv.runtime import data_parallel
from galv.runtime.borders import Form, redistribution, with_borders
from galv.runtime.data_parallel import GradientSync, Group
from galv.runtime.expert_parallel import apply_expert_parallel, shard_experts
from galv.runtime.loss import Targets, shifts_labels
from galv.runtime.loss_scale import LossScale
from galv.runtime.materialize import Materializer, Weights, broadcast_weights
from galv.runtime.mesh import Meshes, join_world
from galv.runtime.module import ParallelModule, Parts
from galv.runtime.offload import ActivationOffload, HostMemory, state_policy
from galv.runtime.pipeline import StageModule, build_stage, separate_copies, side_by_side
from galv.runtime.randomness import Randomness, ShardRegions, Streams, seed_from
from galv.runtime.recompute import apply_recompute
from galv.runtime.replicas import Replicas
from galv.runtime.schedule import PipelineRunner
from galv.runtime.sequence_parallel import apply_sequence_parallel
from galv.runtime.sized_glue import Glue, sized
from galv.runtime.tensor_parallel import apply_tensor_parallel, convert_input, convert_output, stored_layouts
from galv.runtime.ties import Ties
from galv.runtime.transfers import directions
from galv.schedules import SPLIT, Operation


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    glue: Glue | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    weights: Weights | None = None,
    targets: str | None = None,
    fingerprint: str | None = None,
) -> ParallelModule:
    """This rank's part of `model`, ready to train under `plan`. Changes the model in place; every rank must call it.

    Meta tensors of the model are initialized from `seed`, or taken from `weights` (see `materialize`); real ones keep
    rank 0's values. `glue` is the model's traced forward around its units, or gives it when the model has been found
    to be the plan's; needed with a pipeline, and where units have different data-parallel degrees. `device` is by
    default this rank's GPU where there is one and NCCL talks to it, else the CPU. `targets` names the input with the
    targets that the loss is a mean over (see `train_step`).

    Raises RunError when the world size is not the plan's, UnknownName when the plan has no input called `targets`, and
    ModelError when the model is not the plan's (`fingerprint` is the model's, when known), when it has a tensor that
    cannot be initialized, and, where `glue` is needed, when the model returns no loss or cannot be cut.
    """
    _check_model(model, plan, fingerprint)
    _check_targets(plan, targets)
    # A cache of keys and values serves generation only; a block that is recomputed would append to it twice.
    _without_cache(model)
    place = join_world(plan, device)
    meshes = Meshes(plan, place.type)
    streams = _streams(plan, meshes, place, seed)
    chunks = _chunks(model, plan, glue, meshes, streams, place)
    # Every rank still has the whole model, on whatever device.
    broadcast_weights(model, place)
    # All before the first changes the model.
    sources = [Materializer(model, here.ties, seed=seed, device=place, weights=weights) for here in chunks]
    separate_copies([here.stage for here in chunks if isinstance(here.stage, StageModule)])
    for here, source in zip(chunks, sources, strict=True):
        _apply(here, source)
    return _finished(chunks, Targets(shifts_labels(model), targets))


def _apply(here: _Here, materializer: Materializer) -> None:
    """Makes one chunk of the model what the plan says, unit by unit."""
    for group in here.groups:
        for unit in group.units:
            # The unit is whole for a moment; each step after the first keeps this rank's part of it only.
            _materialize(here, unit, materializer)
            # Before recompute, so that recomputing moves between layouts as the first time did.
            _tensor_parallel(here, unit)
            _sequence_parallel(here, unit)
            _expert_parallel(here, unit)
            # Inside data parallelism, so that the parameters gathered for backward serve recomputing too.
            _recompute(here, unit)
            _put_off(here, unit)
        _shard(here, group)
    # What no unit holds: buffers.
    materializer.fill(here.stage, "")
    # After all units, for the outermost module gathers and frees nothing itself but leads those inside.
    _shard_root(here)
    for unit in here.units:
        # Outside of recompute, which goes back to the random state of the first time itself.
        _draw(here, unit)
    # Outside of recompute, so that a recomputed block does not move its input again.
    _convert_borders(here)
    # Last, when it is known what of a unit are parameters.
    _offload_activations(here)


@dataclass(frozen=True)
class _Here:
    """What is known about one chunk of this rank while it is made: the rank's whole part of the model, or a stage."""

    index: int
    """Which of the plan's stages it is."""
    plan: Plan
    meshes: Meshes
    streams: Streams
    device: torch.device
    holder: nn.Module
    """Holds the stage as `model`, so that every module of the stage has a parent."""
    ties: Ties
    sync: GradientSync = field(default_factory=GradientSync)
    layouts: dict[str, Layout] = field(default_factory=dict)

    @property
    def stage(self) -> nn.Module:
        return self.module("")

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.plan.stages[self.index].units

    @property
    def groups(self) -> list[Group]:
        return data_parallel.grouped(self.units, self.plan.model.tied)

    def module(self, name: str) -> nn.Module:
        """The stage's module of that name, as it is now."""
        return self.holder.get_submodule(f"model.{name}".rstrip("."))


def _streams(plan: Plan, meshes: Meshes, device: torch.device, seed: int) -> Streams:
    """A random state for each data-parallel degree: alike where samples are shared, on this stage."""
    own = {
        degree: Randomness(device, seed_from(seed, degree, meshes.data_rank(degree), meshes.stage_index))
        for degree in plan.data_degrees
    }
    return Streams(plan.data_parallel_degree, own)


def _chunks(
    model: nn.Module, plan: Plan, glue: Glue | None, meshes: Meshes, streams: Streams, device: torch.device
) -> list[_Here]:
    """This rank's chunks of the model, in its order: all of it, or stages of its traced forward where one is needed."""
    if not data_parallel.uses_traced_forward(plan):
        return [_here(0, plan, meshes, streams, device, model)]
    if glue is None:
        raise ModelError(
            "a plan with a pipeline, or with different data-parallel degrees, needs the model's traced forward (glue)"
        )
    # All changes of form between units are in it.
    traced = with_borders(sized(glue, plan), plan, meshes, streams)
    indices = plan.pipeline.stages_of_rank(meshes.stage_index)
    return [_here(i, plan, meshes, streams, device, build_stage(model, plan, traced, i, device)) for i in indices]


def _here(index: int, plan: Plan, meshes: Meshes, streams: Streams, device: torch.device, stage: nn.Module) -> _Here:
    holder = nn.Module()
    holder.add_module("model", stage)
    return _Here(index, plan, meshes, streams, device, holder, Ties(stage))


# ----------------------------------------------------------------------------------------------- checks


def _check_model(model: nn.Module, plan: Plan, fingerprint: str | None) -> None:
    if fingerprint is not None and fingerprint != plan.model.fingerprint:
        raise ModelError(
            f"the plan was made for another model than this {type(model).__name__}: {plan.model.name} with fingerprint "
            f"{plan.model.fingerprint}, and this one has {fingerprint}; plan again for this model"
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [name for unit in plan.units() for name in unit.modules if name not in known]
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    units = list(plan.units())
    stray = [name for name in names if not any(data_parallel.owns(unit, name) for unit in units)]
    if missing or stray:
        what = f"a module {missing[0]!r}, which this one has not" if missing else f"no parameter {stray[0]!r}"
        raise ModelError(
            f"the plan was made for another model than this {type(model).__name__}: {plan.model.name} has {what}"
        )


def _check_targets(plan: Plan, targets: str | None) -> None:
    names = [spec.name for spec in plan.model.inputs]
    if targets is not None and targets not in names:
        raise UnknownName("input", targets, names)


def _without_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is True:
            config.use_cache = False


# ----------------------------------------------------------------------------------------------- steps


def _materialize(here: _Here, unit: Unit, materializer: Materializer) -> None:
    for name in unit.modules:
        materializer.fill(here.module(name), name)


def _tensor_parallel(here: _Here, unit: Unit) -> None:
    layout = here.plan.layout_of(unit)
    if layout is None:
        return
    mesh = here.meshes.of(unit.strategy)["tp"]
    regions = ShardRegions(here.device, mesh.get_local_rank())
    for name in unit.modules:
        regions.surround(here.module(name), is_sharded=unit.activation.kind == "S")
    apply_tensor_parallel(lambda name: here.module(absolute_name(unit.modules, name)), layout, mesh, here.ties, regions)
    for name, stored in stored_layouts(unit, layout).items():
        here.layouts.update(dict.fromkeys(_aliases(name, here), stored))


def _expert_parallel(here: _Here, unit: Unit) -> None:
    layout, strategy = here.plan.experts_of(unit), unit.strategy
    if layout is None:
        return
    mesh = here.meshes.experts(strategy)
    modules = apply_expert_parallel(here.module(unit.modules[0]).get_submodule, layout, mesh, here.ties)
    precision = here.plan.training.precision
    data = here.meshes.expert_data(strategy)
    offload = state_policy((strategy,), here.device)
    here.sync.add(shard_experts(modules, data, strategy.zero, precision, strategy.ep, offload), strategy.zero)


def _sequence_parallel(here: _Here, unit: Unit) -> None:
    layout = here.plan.sequence_layout_of(unit)
    if layout is not None:
        (block,) = unit.modules
        apply_sequence_parallel(here.module(block), layout, here.meshes.context(unit.strategy), here.device)


def _aliases(name: str, here: _Here) -> tuple[str, ...]:
    """All names on this stage of the parameter called `name`; a copy on another may be cut in another way."""
    group = next((group for group in here.plan.model.tied if name in group), (name,))
    return tuple(alias for alias in group if any(data_parallel.owns(unit, alias) for unit in here.units))


def _recompute(here: _Here, unit: Unit) -> None:
    for name in unit.modules:
        parent, _, child = f"model.{name}".rstrip(".").rpartition(".")
        apply_recompute(here.holder.get_submodule(parent), child, unit.strategy.recompute)


def _put_off(here: _Here, unit: Unit) -> None:
    """Lets schedules with a split backward make the unit's weight gradients later.

    Not where it recomputes, which would happen twice then.
    """
    if here.plan.pipeline.schedule not in SPLIT or unit.strategy.recompute != "none":
        return
    assert isinstance(here.stage, StageModule), "only pipelines have schedules"
    for name in unit.modules:
        here.stage.weight_gradients.surround(here.module(name))


def _shard(here: _Here, group: Group) -> None:
    if not data_parallel.uses_fsdp(here.plan, group.unit):
        return
    mesh = here.meshes.data(group.unit.strategy)
    modules = [here.module(name) for unit in group.units for name in unit.modules]
    offload = state_policy((unit.strategy for unit in group.units), here.device)
    here.sync.add(data_parallel.shard(modules, mesh, group.zero, here.plan.training.precision, offload), group.zero)


def _offload_activations(here: _Here) -> None:
    units = [unit for unit in here.units if "activations" in unit.strategy.offload]
    if not units:
        return
    offload = ActivationOffload(HostMemory(here.device))
    for unit in units:
        for name in unit.modules:
            offload.add(here.module(name))


def _shard_root(here: _Here) -> None:
    is_unit = any("" in unit.modules for unit in here.units)
    if not is_unit and any(data_parallel.uses_fsdp(here.plan, unit) for unit in here.units):
        # It holds nothing itself: units that need no `fully_shard` stay as they are.
        own = set(here.stage.parameters())
        fully_shard(here.stage, mesh=here.meshes.data(here.units[0].strategy), ignored_params=own)


def _draw(here: _Here, unit: Unit) -> None:
    for name in unit.modules:
        here.streams.surround(here.module(name), unit.strategy.dp)


def _convert_borders(here: _Here) -> None:
    """Changes the layout of the activation in front of each unit that takes another than the unit before it gives.

    Only where the model's own forward runs: a traced one has that in it.
    """
    if isinstance(here.stage, StageModule):
        return
    for before, unit in pairwise(here.units):
        source, target = (Form.of(each, here.plan) for each in (before, unit))
        if source != target:
            change = redistribution(here.meshes, source, target)
            if unit.is_block:
                convert_input(here.module(unit.modules[0]), change)
            else:  # the head has no one module that takes the activation: what gives it changes it
                convert_output(here.module(before.modules[0]), change)


def _finished(chunks: list[_Here], targets: Targets) -> ParallelModule:
    here = chunks[0]
    stages = [chunk.stage for chunk in chunks if isinstance(chunk.stage, StageModule)]
    called: Callable[..., Any] = here.stage
    if data_parallel.uses_ddp(here.plan):
        called = replicas = Replicas(here.stage, here.meshes.data_group(here.plan.data_parallel_degree))
        here.sync.add_replicas(replicas)
    parts = Parts(
        plan=here.plan,
        meshes=here.meshes,
        device=here.device,
        sync=here.sync,
        layouts={name: layout for chunk in chunks for name, layout in chunk.layouts.items()},
        copies=frozenset().union(*(stage.tied_copies for stage in stages)),
        targets=targets,
        called=called,
        streams=here.streams,
        loss_scale=LossScale() if here.plan.training.precision == "fp16" else None,
        runner=_runner(chunks, stages),
    )
    return ParallelModule(side_by_side(stages) if stages else here.stage, parts)


def _runner(chunks: list[_Here], stages: list[StageModule]) -> PipelineRunner | None:
    here, by_index = chunks[0], {chunk.index: chunk for chunk in chunks}
    if here.plan.pipeline.degree == 1:
        return None

    def before(operation: Operation, last: bool) -> None:
        whole = operation.kind == "backward"
        if operation.kind != "forward":
            by_index[operation.chunk].sync.prepare(last=last and whole, whole=whole)

    def after(operation: Operation, last: bool) -> None:
        chunk = by_index[operation.chunk]
        chunk.sync.finish(chunk.stage, last=last)

    groups = directions(here.meshes.of(here.plan.stages[0].units[0].strategy), "pp")
    return PipelineRunner(stages, here.plan, here.meshes.pipeline_group, here.device, before, after, groups)
