"""The ordered list of what is applied to a model to run it under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from galv.errors import ModelError, UnknownName
from galv.planner.plan import Layout, Plan, Redistribution, Unit, absolute_name
from galv.runtime import data_parallel
from galv.runtime.data_parallel import GradientSync, Group
from galv.runtime.loss import Targets, shifts_labels
from galv.runtime.loss_scale import LossScale
from galv.runtime.materialize import Materializer, Weights, broadcast_weights
from galv.runtime.mesh import Meshes, join_world
from galv.runtime.module import ParallelModule, Parts
from galv.runtime.offload import ActivationOffload, HostMemory, state_policy
from galv.runtime.pipeline import StageModule, build_stage
from galv.runtime.randomness import Randomness, ShardRegions, seed_from
from galv.runtime.recompute import apply_recompute
from galv.runtime.replicas import Replicas
from galv.runtime.schedule import PipelineRunner
from galv.runtime.tensor_parallel import apply_tensor_parallel, convert_argument, convert_input, convert_output
from galv.runtime.ties import Ties

Glue = fx.GraphModule | Callable[[], fx.GraphModule]
"""A model's traced forward around its units, or what gives it."""


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
    to be the plan's; needed with a pipeline. `device` is by default this rank's GPU where there is one and NCCL talks
    to it, else the CPU. `targets` names the input with the targets that the loss is a mean over (see `train_step`).

    Raises RunError when the world size is not the plan's, UnknownName when the plan has no input called `targets`, and
    ModelError when the model is not the plan's (`fingerprint` is the model's, when known), when it has a tensor that
    cannot be initialized, or when it returns no loss and there is a pipeline.
    """
    _check_model(model, plan, fingerprint)
    _check_targets(plan, targets)
    # A cache of keys and values serves generation only; a block that is recomputed would append to it twice.
    _without_cache(model)
    place = join_world(plan, device)
    here = _here(model, plan, glue, Meshes(plan, place.type), place)
    # Every rank still has the whole model, on whatever device.
    broadcast_weights(model, place)
    materializer = Materializer(model, here.ties, seed=seed, device=place, weights=weights)
    for group in here.groups:
        for unit in group.units:
            # The unit is whole for a moment; each step after the first keeps this rank's part of it only.
            _materialize(here, unit, materializer)
            # Before recompute, so that recomputing moves between layouts as the first time did.
            _tensor_parallel(here, unit)
            # Inside data parallelism, so that the parameters gathered for backward serve recomputing too.
            _recompute(here, unit)
        _shard(here, group)
    # What no unit holds: buffers.
    materializer.fill(here.stage, "")
    # After all units, for the outermost module gathers and frees nothing itself but leads those inside.
    _shard_root(here)
    # Outside of recompute, so that a recomputed block does not move its input again.
    _convert_borders(here)
    # Last, when it is known what of a unit are parameters.
    _offload_activations(here)
    return _finished(here, Targets(shifts_labels(model), targets), seed)


@dataclass(frozen=True)
class _Here:
    """What is known about this rank while its part of the model is made."""

    plan: Plan
    meshes: Meshes
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
        return self.plan.stages[self.meshes.stage_index].units

    @property
    def groups(self) -> list[Group]:
        return data_parallel.grouped(self.units, self.plan.model.tied)

    def module(self, name: str) -> nn.Module:
        """The stage's module of that name, as it is now."""
        return self.holder.get_submodule(f"model.{name}".rstrip("."))


def _here(model: nn.Module, plan: Plan, glue: Glue | None, meshes: Meshes, device: torch.device) -> _Here:
    stage: nn.Module = model
    if plan.pipeline.degree > 1:
        if glue is None:
            raise ModelError("a plan with a pipeline needs the model's traced forward (glue) to be cut into stages")
        traced = glue if isinstance(glue, fx.GraphModule) else glue()
        stage = build_stage(model, plan, traced, meshes.stage_index, device)
    holder = nn.Module()
    holder.add_module("model", stage)
    return _Here(plan, meshes, device, holder, Ties(stage))


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
    for part in layout.modules:
        for own_name, change in part.parameters.items():
            name = absolute_name(unit.modules, f"{part.module}.{own_name}".lstrip("."))
            here.layouts.update(dict.fromkeys(_aliases(name, here.plan), change.source))


def _aliases(name: str, plan: Plan) -> tuple[str, ...]:
    """All names of the parameter called `name`."""
    return next((group for group in plan.model.tied if name in group), (name,))


def _recompute(here: _Here, unit: Unit) -> None:
    for name in unit.modules:
        parent, _, child = f"model.{name}".rstrip(".").rpartition(".")
        apply_recompute(here.holder.get_submodule(parent), child, unit.strategy.recompute)


def _shard(here: _Here, group: Group) -> None:
    if not data_parallel.uses_fsdp(here.plan):
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
    if data_parallel.uses_fsdp(here.plan) and not is_unit:
        fully_shard(here.stage, mesh=here.meshes.data(here.units[0].strategy))


def _convert_borders(here: _Here) -> None:
    """Changes the layout of the activation in front of each unit that takes another than the unit before it gives."""
    everything = list(here.plan.units())
    for before, unit in pairwise(everything):
        if unit not in here.units:
            continue
        mesh = here.meshes.of(unit.strategy)["tp"] if unit.strategy.tp > 1 else None
        if isinstance(here.stage, StageModule) and not unit.is_block and before not in here.units:
            _convert_crossings(here.stage, unit, mesh)
        elif before.activation != unit.activation:
            assert mesh is not None, "only the tensor axis has layouts"
            change = Redistribution(source=before.activation, target=unit.activation)
            if unit.is_block:
                convert_input(here.module(unit.modules[0]), change, mesh)
            else:  # the head has no one module that takes the activation: what gives it changes it
                convert_output(here.module(before.modules[0]), change, mesh)


def _convert_crossings(stage: StageModule, unit: Unit, mesh: DeviceMesh | None) -> None:
    """Gives `unit`, the first of the stage and no block, all that crosses to it in its own layout."""
    for position, crossing in enumerate(stage.crossings_in):
        if crossing.layout != unit.activation:
            assert mesh is not None, "only the tensor axis has layouts"
            change = Redistribution(source=crossing.layout, target=unit.activation)
            convert_argument(stage, position, change, mesh)


def _finished(here: _Here, targets: Targets, seed: int) -> ParallelModule:
    called: Callable[..., Any] = here.stage
    if data_parallel.uses_ddp(here.plan):
        called = replicas = Replicas(here.stage, here.meshes.data_group)
        here.sync.add_replicas(replicas)
    parts = Parts(
        plan=here.plan,
        meshes=here.meshes,
        device=here.device,
        sync=here.sync,
        layouts=here.layouts,
        copies=here.stage.tied_copies if isinstance(here.stage, StageModule) else frozenset(),
        targets=targets,
        called=called,
        randomness=Randomness(here.device, seed_from(seed, here.meshes.data_rank, here.meshes.stage_index)),
        loss_scale=LossScale() if here.plan.training.precision == "fp16" else None,
        runner=_runner(here),
    )
    return ParallelModule(here.stage, parts)


def _runner(here: _Here) -> PipelineRunner | None:
    if not isinstance(here.stage, StageModule):
        return None
    group = here.meshes.base.get_group("pp")
    return PipelineRunner(
        here.stage, here.plan, group, here.device, before_backward=lambda last: here.sync.prepare(last=last)
    )
