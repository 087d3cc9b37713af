"""Watches one rank's training step: every byte that it holds, with what it is for, and every collective that it calls.

A storage's kind is that of its whole life. It follows from who makes it (FSDP's gathering and reducing, the update),
from what holds it in the end (a parameter's gradient, the optimizer's state), or from when it lives: made in a forward
and still there when a backward has begun, it is an activation; anything else is temporary.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from galv.runtime.data_parallel import GradientSync
from galv.runtime.fake_world import stand_in
from galv.runtime.module import ParallelModule
from galv.runtime.offload import HostMemory
from galv.runtime.schedule import PipelineRunner
from galv.schedules import Operation
from galv.storages import Timeline, storage_key, tensors_in

MemoryKind = Literal[
    "parameters", "copies", "gathered", "gradients", "reductions", "optimizer", "activations", "temporaries", "host"
]
"""`copies` are parameters gathered for a whole step, `gathered` those gathered for a moment; `reductions` gradients on
their way into `gradients`; `host` lies in the host's memory and does not count."""
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True)
class Call:
    """One collective that the rank called."""

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    """Of the full tensor: what an all-gather gives, what a reduce-scatter takes."""


@dataclass
class _Mark:
    """Where a phase of the step begins."""

    event: int
    name: str
    num_backwards: int
    """Begun so far."""


@dataclass
class Watch(TorchDispatchMode):
    """Sees what happens while it is entered; inside `hooks()` it also knows FSDP's doings."""

    memory: Timeline = field(default_factory=Timeline)
    kinds: dict[int, MemoryKind] = field(default_factory=dict)
    """Of storages whose kind is known already."""
    calls: list[tuple[int | None, Call]] = field(default_factory=list)
    """With the microbatch that each is for; None for those of the step."""
    marks: list[_Mark] = field(default_factory=list)
    answers: bool = True
    """Whether tensors have no values, so that what the program asks them for has to be made up."""

    def __post_init__(self) -> None:
        super().__init__()
        self._region: MemoryKind | None = None
        self._task, self._num_backwards = -1, 0
        self._phase = "forward"
        self._microbatch: int | None = None
        self._in_pipeline = False

    # -- what the driver says

    def begin(self, phase: str) -> None:
        """A phase of the step begins: `forward`, `clip`, `update`."""
        self._phase = phase
        self._mark(phase)

    def settle(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Follows these tensors' storages, and says what they are for."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.memory.add(local)
            number = self.memory.number(local)
            if number is not None and self.kinds.get(number) not in ("gradients", "host"):
                self.kinds[number] = kind

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Within, FSDP tells what it allocates for, and the runtime when microbatches begin."""
        patched = {
            (FSDPParamGroup, "unshard"): self._gathers,
            (FSDPParamGroup, "wait_for_unshard"): self._gathers,
            (FSDPParamGroup, "post_backward"): self._reduces,
            (ParallelModule, "_accumulate"): self._ends,
            (GradientSync, "prepare"): self._prepares,
            (PipelineRunner, "_execute"): self._executes,
            (torch.UntypedStorage, "resize_"): self._resizes,
            (HostMemory, "store"): self._stores,
        }
        with contextlib.ExitStack() as stack:
            for (owner, name), wrap in patched.items():
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
            yield

    # -- what it sees

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come here too
        if self.answers and func is torch.ops.aten._local_scalar_dense.default:
            return stand_in(args[0])
        kwargs = kwargs or {}
        self._note_backward()
        out = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._note_call(func, args, kwargs, out)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if not self.memory.holds(storage_key(tensor)):
                self._note_fresh(tensor, (args, kwargs))
        return out

    def _note_fresh(self, tensor: Tensor, given: Any) -> None:
        key = storage_key(tensor)
        if any(storage_key(other) == key for other in tensors_in(given)):
            return
        number = self.memory.add(tensor)
        if number is not None and self._region is not None:
            self.kinds[number] = self._region

    def _note_backward(self) -> None:
        """Looks whether a backward pass has begun or ended since the last operator."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._num_backwards += task > self._task >= -1 and task != -1
            self._task = task
            self._mark("backward" if task != -1 else self._phase)

    def _mark(self, name: str) -> None:
        self.marks.append(_Mark(len(self.memory.events), name, self._num_backwards))

    def _note_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        kind = next((kind for part, kind in _KINDS if part in func._schema.name), None)
        if kind is None:
            return
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        ranks = tuple(dist.get_process_group_ranks(_group(named)))
        if len(ranks) > 1:
            sizes = [sum(map(_num_bytes, tensors_in(value))) for value in (*named.values(), out)]
            self.calls.append((self._microbatch, Call(kind, ranks, max(sizes))))

    # -- hooks

    @contextlib.contextmanager
    def within(self, kind: MemoryKind) -> Iterator[None]:
        """What is made within is of that kind."""
        before, self._region = self._region, kind
        try:
            yield
        finally:
            self._region = before

    def _gathers(self, own: Any) -> Any:
        def gather(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            with self.within("gathered" if group._reshard_after_forward else "copies"):
                return own(group, *args, **kwargs)

        return gather

    def _reduces(self, own: Any) -> Any:
        def reduce(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            self.settle(_unsharded_gradients(group), "reductions" if group.reduce_grads else "gradients")
            with self.within("reductions"):
                result = own(group, *args, **kwargs)
            for parameter in group.fsdp_params:
                reduced, whole = parameter.sharded_param.grad, parameter.unsharded_accumulated_grad
                self.settle([] if whole is None else [whole], "gradients")
                self.settle([] if reduced is None else [reduced], "host" if parameter.offload_to_cpu else "gradients")
            return result

        return reduce

    def _prepares(self, own: Any) -> Any:
        def prepare(sync: GradientSync, **options: Any) -> None:
            if not self._in_pipeline:  # once before each microbatch
                self._microbatch = 0 if self._microbatch is None else self._microbatch + 1
            own(sync, **options)

        return prepare

    def _executes(self, own: Any) -> Any:
        def execute(runner: PipelineRunner, operation: Operation, *args: Any) -> Any:
            self._in_pipeline, self._microbatch = True, operation.microbatch
            result = own(runner, operation, *args)
            self._microbatch = None
            return result

        return execute

    def _ends(self, own: Any) -> Any:
        def accumulate(module: ParallelModule, *args: Any) -> Any:
            result = own(module, *args)
            self._microbatch = None
            return result

        return accumulate

    def _stores(self, own: Any) -> Any:
        def store(memory: HostMemory, tensor: Tensor) -> Tensor:
            with self.within("host"):
                return own(memory, tensor)

        return store

    def _resizes(self, own: Any) -> Any:
        def resize(storage: Any, size: int) -> Any:
            result = own(storage, size)
            number = self.memory.resized(storage)
            if number is not None and self._region is not None:
                self.kinds[number] = self._region
            return result

        return resize

    # -- what it has seen

    def kind_of_all(self) -> dict[int, MemoryKind]:
        """The kind of every storage seen."""
        starts = [mark.event for mark in self.marks]
        born: dict[int, _Mark] = {}
        found: dict[int, MemoryKind] = dict(self.kinds)
        alive: Counter[int] = Counter()
        for event, (number, change) in enumerate(self.memory.events):
            mark = self.marks[max(bisect.bisect_right(starts, event) - 1, 0)]
            first = born.setdefault(number, mark)
            alive[number] += change
            if number not in found and first.name == "forward" and mark.num_backwards > first.num_backwards:
                found[number] = "activations"
            elif number not in found and alive[number] == 0:
                found[number] = "temporaries"
        return found


_KINDS = (
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "p2p"),
    ("recv", "p2p"),
)
"""Parts of operators' names, and the collective that each is."""


def _group(named: dict[str, Any]) -> dist.ProcessGroup:
    group: Any = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a kind of text
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unsharded_gradients(group: FSDPParamGroup) -> list[Tensor]:
    parameters = (p.unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
