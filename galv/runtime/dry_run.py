"""Runs a plan's real training step as one rank of the plan's whole world, without that world and without its memory.

Everything is the runtime's own: `parallelize`, forward, backward and schedule, clipping, the optimizer's update. Only
tensors are fake and collectives return at once (`fake_world`), so one CPU can stand for any rank of any cluster. One
step warms up: optimizers make their state in the first, and libraries what they keep. The next one is watched.

Microbatches in the middle of a step do what the first and the last of them have in common. Of many, a few are run, and
that counts for those left out. (Under GPipe all are alive at once, and all are run.)
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule

from galv.errors import ModelError, UsageError
from galv.planner.plan import Plan
from galv.runtime.fake_world import fake_world
from galv.runtime.initializing import on_meta
from galv.runtime.loss import loss_of
from galv.runtime.module import ParallelModule
from galv.runtime.parallelize import parallelize
from galv.runtime.ties import named_tensors
from galv.runtime.watch import MEMORY_KINDS, Call, MemoryKind, Watch
from galv.storages import tensors_in

MAX_NORM = 1.0


@dataclass(frozen=True)
class PhaseMemory:
    """The fullest moment of one phase of the step."""

    phase: str
    """`forward 1`, `backward 1`, `clip`, `update`, ..."""
    num_bytes: dict[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return sum(size for kind, size in self.num_bytes.items() if kind != "host")


@dataclass(frozen=True)
class Collective:
    """A collective that the rank calls in a step, `count` times."""

    kind: str
    axis: str
    """`tensor`, `data`, `shard`, `replicate`, `pipeline`."""
    num_bytes: int
    count: int


@dataclass(frozen=True)
class DryRun:
    """What one rank holds and calls in a step."""

    rank: int
    stage: int
    phases: tuple[PhaseMemory, ...]
    collectives: tuple[Collective, ...]
    num_microbatches_run: int

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total_bytes)


def dry_run(
    build: Callable[[], nn.Module],
    plan: Plan,
    rank: int,
    *,
    glue: Callable[[nn.Module, int], fx.GraphModule],
    fingerprint: Callable[[nn.Module], str | None] = lambda model: None,
    kernels: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    targets: str | None = None,
) -> DryRun:
    """One training step of `plan` as `rank` sees it. `build` gives the model, `glue` its traced forward for so many
    samples.

    Within `kernels()`, operators are those of the plan's devices. Raises UsageError for a rank that the plan has not,
    ModelError for a model that is not the plan's or whose work depends on the data, RunError in a process group.
    """
    if not 0 <= rank < plan.num_devices:
        raise UsageError(f"the plan has ranks 0 to {plan.num_devices - 1}, not {rank}")
    stage = rank // (plan.num_devices // plan.pipeline.degree)
    short = _with_fewer_microbatches(plan, stage)
    model = on_meta(build())
    with fake_world(plan.num_devices, rank, all_to_all=plan.cluster.kind == "cuda") as mode:
        values = _Values(model, mode)
        module = parallelize(
            model,
            short,
            glue=lambda num_samples: glue(model, num_samples),
            device="cpu",
            weights=values.of,
            targets=targets,
            fingerprint=fingerprint(model),
        )
        watch = Watch()
        try:
            with mode, kernels(), watch.hooks(), _few_objects():
                first = _run(module, short, watch)
            axes = _axes(module)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise ModelError(
                f"what {plan.model.name} does depends on its data ({error}), so it cannot be run without any; measure "
                "it with galv run"
            ) from error
        finally:
            watch.memory.stop()
    return DryRun(
        rank,
        stage,
        _phases(watch, first),
        _counted(watch.calls, axes, short.training.num_microbatches, plan.training.num_microbatches),
        short.training.num_microbatches,
    )


# ----------------------------------------------------------------------------------------------- before


def _with_fewer_microbatches(plan: Plan, stage: int) -> Plan:
    """The same plan with a global batch of as many microbatches as tell what one of any number does and holds."""
    count, degree = plan.training.num_microbatches, plan.pipeline.degree
    enough = count if plan.pipeline.schedule == "gpipe" else min(count, degree - stage + (2 if degree > 1 else 1))
    enough = min(count, max(enough, degree)) if degree > 1 else enough
    batch = plan.training.global_batch * enough // count
    training = plan.training.model_copy(update={"num_microbatches": enough, "global_batch": batch})
    return plan.model_copy(update={"training": training})


class _Values:
    """Values of a model's tensors: fake ones."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        self._tensors, self._mode = dict(named_tensors(model)), mode

    def of(self, name: str) -> Tensor | None:
        """One for the tensor of that name."""
        tensor = self._tensors.get(name)
        with self._mode:
            return None if tensor is None else torch.empty_like(tensor, device="cpu", requires_grad=False)


@contextlib.contextmanager
def _few_objects() -> Iterator[None]:
    """Python's collector leaves alone what is there before: it would take longer than the step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _batch(plan: Plan) -> dict[str, Tensor]:
    """One rank's samples of a step."""
    samples = plan.micro_batch * plan.training.num_microbatches
    return {
        spec.name: torch.empty(plan.model.input_shape(spec, samples), dtype=getattr(torch, spec.dtype))
        for spec in plan.model.inputs
    }


# ----------------------------------------------------------------------------------------------- the step


def _run(module: ParallelModule, plan: Plan, watch: Watch) -> int:
    """Trains for two steps, the first one to warm up; gives the index of the second one's first mark."""
    batch = _batch(plan)
    hosted = _on_the_host(module)
    with torch.no_grad():
        for parameter in module.parameters():
            watch.settle([parameter], "host" if id(parameter) in hosted else "parameters")
        watch.settle(module.buffers(), "parameters")
        watch.settle(batch.values(), "temporaries")
    optimizer = module.optimizer()
    with watch:
        _step(module, optimizer, watch, hosted, lambda: _warm_up(module, plan, batch))
        first = len(watch.marks)
        watch.calls.clear()
        _step(module, optimizer, watch, hosted, lambda: module.train_step(batch))
    return first


def _on_the_host(module: ParallelModule) -> set[int]:
    """The ids of the parameters that FSDP keeps in the host's memory, as their gradients and their state are."""
    states = (part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule))
    groups = (group for state in states if (group := state._fsdp_param_group) is not None)
    return {id(p.sharded_param) for group in groups for p in group.fsdp_params if p.offload_to_cpu}


def _warm_up(module: ParallelModule, plan: Plan, batch: dict[str, Tensor]) -> None:
    """The gradients of one microbatch, nothing sent or received."""
    dims = {spec.name: spec.batch_dim for spec in plan.model.inputs}
    count = plan.training.num_microbatches
    one = {name: t if (dim := dims[name]) is None else t.chunk(count, dim)[0] for name, t in batch.items()}
    runner = module._parts.runner
    if runner is None:
        loss_of(module(**one)).backward()
        return
    for chunk in runner._chunks.values():
        given = [torch.empty_like(c.meta, device="cpu", requires_grad=c.needs_grad) for c in chunk.stage.crossings_in]
        output = chunk.stage(*given, **{name: one[name] for name in chunk.stage.input_names})
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
        chunk.stage.weight_gradients.take().make()


def _step(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    watch: Watch,
    hosted: set[int],
    accumulate: Callable[[], object],
) -> None:
    watch.begin("forward")
    accumulate()
    for parameter in module.parameters():
        if parameter.grad is not None:
            watch.settle([parameter.grad], "host" if id(parameter) in hosted else "gradients")
    watch.begin("clip")
    module.clip_grad_norm_(MAX_NORM)
    watch.begin("update")
    optimizer.step()
    for owner, state in optimizer.state.items():
        watch.settle(tensors_in(state), "host" if id(owner) in hosted else "optimizer")
    optimizer.zero_grad()


# ----------------------------------------------------------------------------------------------- after


def _phases(watch: Watch, first: int) -> tuple[PhaseMemory, ...]:
    """The fullest moments of the phases that begin with mark `first`."""
    kinds = watch.kind_of_all()
    alive: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
    phases: list[PhaseMemory] = []
    events, borders = watch.memory.events, [*(mark.event for mark in watch.marks[first:]), len(watch.memory.events)]
    for number, change in events[: borders[0]]:
        alive[kinds.get(number, "temporaries")] += change
    counts: Counter[str] = Counter()
    for mark, start, stop in zip(watch.marks[first:], borders, borders[1:], strict=False):
        fullest, highest = dict(alive), sum(alive.values()) - alive["host"]
        for number, change in events[start:stop]:
            alive[kinds.get(number, "temporaries")] += change
            total = sum(alive.values()) - alive["host"]
            if total > highest:
                fullest, highest = dict(alive), total
        counts[mark.name] += 1
        is_one = mark.name in ("clip", "update")
        phases.append(PhaseMemory(mark.name if is_one else f"{mark.name} {counts[mark.name]}", fullest))
    return tuple(phases)


def _axes(module: ParallelModule) -> dict[tuple[int, ...], str]:
    """What the groups of this rank are called, by their ranks."""
    import torch.distributed as dist

    meshes, found = module._parts.meshes, dict[tuple[int, ...], str]()
    groups = [(meshes.pipeline_group, "pipeline")]
    names = {"tp": "tensor", "dp_shard": "shard", "dp_replicate": "replicate", "ep": "expert"}
    for unit in module.plan.units():
        groups.append((meshes.data_group(unit.strategy.dp), "data"))
        for mesh in (meshes.of(unit.strategy), *([meshes.experts(unit.strategy)] if unit.strategy.ep > 1 else [])):
            groups += [
                (mesh.get_group(axis), name) for axis, name in names.items() if axis in (mesh.mesh_dim_names or ())
            ]
    for group, name in groups:
        found.setdefault(tuple(dist.get_process_group_ranks(group)), name)
    return found


def _counted(
    calls: list[tuple[int | None, Call]], axes: dict[tuple[int, ...], str], num_run: int, num_in_all: int
) -> tuple[Collective, ...]:
    """The collectives of a step, those of microbatches that were left out added."""
    counts, messages = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    ends = (Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]())
    for microbatch, call in calls:
        key = (call.kind, axes.get(call.ranks, f"{len(call.ranks)} ranks"), call.num_bytes)
        if microbatch is not None and call.kind == "p2p":
            messages[key] += 1  # posted ahead, so all that is known is that every microbatch has as many
            continue
        counts[key] += 1
        if microbatch in (0, num_run - 1):
            ends[microbatch > 0][key] += 1
    for key, count in (ends[0] & ends[1]).items():
        counts[key] += (num_in_all - num_run) * count
    for key, count in messages.items():
        counts[key] += count // num_run * num_in_all
    return tuple(Collective(kind, axis, size, count) for (kind, axis, size), count in sorted(counts.items()))
