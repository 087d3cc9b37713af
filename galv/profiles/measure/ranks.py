"""The processes that measure together: their groups for every setting, and what this machine is."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from galv.profiles.measure.work import Place

TIMEOUT = timedelta(hours=2)
"""Ranks that take no part in a setting wait for the others through all of it."""


@dataclass(frozen=True)
class Machine:
    """What is found here."""

    name: str
    kind: Literal["cuda", "cpu"]
    driver: str
    num_cores: int
    memory_bytes: int
    """Of one GPU, or what one of the processes can have of the host's."""
    context_bytes: int
    """Taken before the first tensor."""

    @property
    def key(self) -> str:
        """What samples may be mixed that have it in common."""
        return f"{self.name} {self.driver} torch {torch.__version__}"


def join(store: dist.Store | None, rank: int, world_size: int, *, gpu: int | None) -> torch.device:
    """The device of this rank, which is in the default process group from now on where there are several ranks."""
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(device)
    if world_size > 1:
        backend = "gloo" if gpu is None else "nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return device


def counts_of(per_node: int, num_nodes: int, *, on_gpu: bool) -> tuple[int, ...]:
    """How many processes of a node are at work in each setting, ascending.

    GPUs do not share what they compute with; processes on a CPU do. All nodes take part where there are several.
    """
    if on_gpu or num_nodes > 1:
        return (per_node,)
    return tuple(sorted({2**i for i in range(per_node.bit_length()) if 2**i <= per_node} | {per_node}))


def place_of(
    device: torch.device, processes: int, per_node: int, num_nodes: int
) -> tuple[Place, dist.ProcessGroup | None]:
    """(this rank's place, the group of all at work) with `processes` of each node. Collective over all ranks."""
    if processes * num_nodes == 1:
        return Place(device, {}), None
    rank = dist.get_rank()
    working = [node * per_node + i for node in range(num_nodes) for i in range(processes)]
    everyone = _own(rank, [working])
    groups = {}
    for size, nodes in group_shapes(processes, num_nodes):
        found = _own(rank, _members(size, nodes, processes, per_node, num_nodes))
        if found is not None:
            groups[size, nodes] = found
    return Place(device, groups), everyone


def group_shapes(processes: int, num_nodes: int) -> tuple[tuple[int, int], ...]:
    """(members, nodes) of the groups to measure: every divisor of a node's processes; one a node; all together."""
    inside = [(size, 1) for size in range(2, processes + 1) if processes % size == 0]
    across = [(num_nodes, num_nodes), (num_nodes * processes, num_nodes)] if num_nodes > 1 else []
    return tuple(dict.fromkeys((*inside, *across)))


def _members(size: int, nodes: int, processes: int, per_node: int, num_nodes: int) -> list[list[int]]:
    """The ranks of each group of one shape; together they hold all ranks at work."""
    if nodes == 1:
        starts = [(node, i) for node in range(num_nodes) for i in range(0, processes, size)]
        return [[node * per_node + i + j for j in range(size)] for node, i in starts]
    if size == nodes:
        return [[node * per_node + i for node in range(num_nodes)] for i in range(processes)]
    return [[node * per_node + i for node in range(num_nodes) for i in range(processes)]]


def _own(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The group of `groups` that holds `rank`; every rank makes all of them."""
    own = None
    for members in groups:
        group = dist.new_group(list(members), timeout=TIMEOUT)
        own = group if rank in members else own
    return own


# ----------------------------------------------------------------------------------------------- the machine


def machine(device: torch.device, processes: int) -> Machine:
    """What `device` is, shared by so many processes."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        driver = f"CUDA {torch.version.cuda}"
        taken = total - free - torch.cuda.memory_reserved(device)
        return Machine(torch.cuda.get_device_name(device), "cuda", driver, num_cores, total, taken)
    memory = max(host_memory_bytes() // processes, 2**30)
    name = f"{_cpu_name()} ({num_cores} cores)"
    return Machine(name, "cpu", f"{platform.system()} {platform.release()}", num_cores, memory, resident_bytes())


def resident_bytes() -> int:
    """The most that this process has held in memory."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def host_memory_bytes() -> int:
    """The host's memory, or what this container may have of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def free_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return host_memory_bytes() // 2


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
