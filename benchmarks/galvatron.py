"""Side by side with Hetu-Galvatron 3.0's search: its profile files, its cost formulas, its plans, and galv's solver.

    python benchmarks/galvatron.py --data DIR

DIR holds `inputs/` (profile files of the Galvatron repository, as they are) and `results/*.json` (one search each: arguments,
plan, predicted throughput, CPU seconds). The cost table is built from the inputs by Galvatron's formulas, defects and all, so
both plans are scored by the same figure, its own predicted step time T. T leaves re-sharding between layers out; its search
charges it a hundred times too high. Here both plans also show what re-sharding takes at the physical constant.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise, product
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from galv.planner.plan import Strategy as GalvStrategy
from galv.planner.search.assign import Assigner
from galv.planner.search.table import Option
from galv.planner.space import divisors

SEQ_LEN, HIDDEN = 2048, 4096
MIB = 2**20


class Layer(NamedTuple):
    """A layer's strategy. Its tensor degree is Megatron's, or Ulysses' when `ulysses`."""

    degree: int
    ulysses: bool
    zero3: bool
    recompute: bool


class Ends(NamedTuple):
    """The strategy of embedding and head."""

    degree: int
    ulysses: bool
    zero3: bool


@dataclass(frozen=True)
class Outer:
    """What all layers of a plan share."""

    world: int
    batch: int
    chunks: int
    pp: int

    def microbatch(self, degree: int) -> int:
        """Samples of one microbatch in a data-parallel group, rounded down as Galvatron does."""
        return self.batch // self.chunks // (self.world // self.pp // degree)


@dataclass(frozen=True)
class Choice:
    """A whole plan."""

    outer: Outer
    ends: Ends
    division: tuple[int, ...]
    layers: tuple[Layer, ...]
    buffer_degree: int
    """The tensor degree that the all-gather buffer is made for; 0 for none."""


class Costs:
    """Galvatron's cost formulas over its profile files. Milliseconds and MiB."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        compute, memory = self._read("computation_profiling_bf16_llama2-7b_all"), self._read(
            "memory_profiling_bf16_llama2-7b_all"
        )
        self.overlap = self._read("overlap_coefficient")["overlap_coe"]
        self.layer_fit, self.ends_fit = _line(compute, "0"), _line(compute, "other")
        layer = memory["layertype_0_sp"]
        layer = (layer[0] if isinstance(layer, list) else layer)[str(SEQ_LEN)]
        self.parameter_mib, self.activation = layer["parameter_size"], layer["tp_activation_per_bsz_dict"]
        self.ends_memory = {
            where: memory[f"other_memory_{where}_sp"][str(SEQ_LEN)] for where in ("pp_off", "pp_on_first", "pp_on_last")
        }
        self.bandwidth = self._of_cluster("allreduce_bandwidth")
        self.p2p_bandwidth = self._of_cluster("p2p_bandwidth")
        self.tensor_times = self._of_cluster("sp_time")

    def _read(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def _of_cluster(self, name: str) -> dict[str, float]:
        return self._read(f"{name}_{self.nodes}nodes_8gpus_per_node")

    # -- time

    def ms_per_mib(self, group: int, *, consecutive: bool) -> float:
        """Of an all-reduce's traffic in a group."""
        if group == 1:
            return 0.0
        whole = f"allreduce_size_{group}_consec_1"
        name = whole if consecutive else f"allreduce_size_{group}_consec_0"
        return 1 / self.bandwidth.get(name, self.bandwidth[whole])

    def tensor_ms(self, kind: str, degree: int, samples: int) -> float:
        """One all-gather (half an all-reduce) or all-to-all of a microbatch's activation."""
        if degree == 1:
            return 0.0
        mib = samples * SEQ_LEN * HIDDEN * 2 / MIB
        sizes = {
            int(name.split("_")[3][:-2]): ms
            for name, ms in self.tensor_times.items()
            if name.startswith(f"{kind}_size_{degree}_")
        }
        share = 0.5 if kind == "allreduce" else 1.0
        if mib in sizes:
            return share * sizes[int(mib)]
        slope, start = np.polyfit(list(sizes), list(sizes.values()), 1)
        return share * float(slope * mib + start)

    @lru_cache(maxsize=65536)  # noqa: B019  # lives as long as the program
    def layer_ms(self, outer: Outer, layer: Layer, num_layers: int, *, sync: bool) -> float:
        """One microbatch through one layer; with `sync` gradients are reduced."""
        samples, data = outer.microbatch(layer.degree), outer.world // outer.pp // layer.degree
        shards = data * (layer.degree if layer.ulysses else 1)
        tensor = 1 if layer.ulysses else layer.degree
        forward = _at(self.layer_fit, samples / layer.degree)
        backward = (3 if layer.recompute else 2) * forward
        traffic = 2 * (shards - 1) * (self.parameter_mib / tensor / shards) / 2
        per_mib = self.ms_per_mib(shards, consecutive=tensor == 1)
        count = (4 if layer.ulysses else 6) * (1.5 if layer.recompute else 1)
        total = forward + (self._overlapped(traffic, backward, per_mib) if sync else backward)
        total += count * self.tensor_ms("all2all" if layer.ulysses else "allreduce", layer.degree, samples)
        total += 0.5 * traffic * per_mib if layer.zero3 else 0.0
        if outer.pp > 1:
            mib = outer.pp * 2 * samples * SEQ_LEN * HIDDEN * 2 / MIB
            total += mib / self.p2p_bandwidth[f"pp_size_{outer.pp}"] / num_layers
        return total

    def _overlapped(self, traffic: float, backward: float, per_mib: float) -> float:
        slow = traffic * per_mib * self.overlap
        compute = backward * self.overlap
        if slow > compute:
            return compute + (traffic - compute / (per_mib * self.overlap)) * per_mib
        return slow + (backward - slow / self.overlap)

    def ends_ms(self, outer: Outer, ends: Ends) -> tuple[float, float]:
        """One microbatch through the embedding, and through the head; gradient reduction is left out of T."""
        samples = outer.microbatch(ends.degree)
        shards = outer.world // outer.pp // (1 if ends.ulysses else ends.degree)
        forward = _at(self.ends_fit, samples / ends.degree)
        tensor = 1 if ends.ulysses else ends.degree
        per_mib = self.ms_per_mib(shards, consecutive=tensor == 1)
        found = []
        for where in ("pp_on_first", "pp_on_last"):
            states = self.ends_memory["pp_off" if outer.pp == 1 else where]["model_states"][str(tensor)]
            share = 0.5 if outer.pp == 1 else 1.0
            gather = share * (shards - 1) / shards * states / 4 * 0.5 * per_mib / 2 if ends.zero3 else 0.0
            compute = [forward / 2, forward]
            # Gathering in forward and again in backward; what is hidden slows computation down.
            seconds = sum(_slowed(own, gather, self.overlap) for own in compute)
            found.append(seconds + self.tensor_ms("allreduce", tensor, samples))
        return found[0], found[1]

    def resharding_ms(self, outer: Outer, layers: Sequence[Layer]) -> float:
        """What changing tensor degrees between neighbours takes in a step, at the physical constant."""
        return outer.chunks * sum(self.change_ms(outer, a, b) for a, b in pairwise(layers))

    def change_ms(self, outer: Outer, before: Layer, after: Layer) -> float:
        """One microbatch's activation brought from one layer's degree to the next one's."""
        if before.degree == after.degree:
            return 0.0
        larger = max(before.degree, after.degree)
        samples = outer.microbatch(larger)
        mib = (larger - 1) / larger * samples * SEQ_LEN * HIDDEN * 2 / MIB
        return mib * self.ms_per_mib(larger, consecutive=True)

    def step_ms(self, choice: Choice) -> float:
        """T: the step time by which Galvatron ranks plans."""
        outer, size = choice.outer, len(choice.layers)
        ends = self.ends_ms(outer, choice.ends)
        busy, synced, start = [], [], 0
        for stage, number in enumerate(choice.division):
            mine = choice.layers[start : start + number]
            own = sum(self.layer_ms(outer, layer, size, sync=False) for layer in mine)
            own += ends[0] * (stage == 0) + ends[1] * (stage == outer.pp - 1)
            busy.append(own)
            synced.append(sum(self.layer_ms(outer, layer, size, sync=True) for layer in mine))
            start += number
        return _pipeline_ms(busy, synced, outer.chunks)

    # -- memory

    def state_ratio(self, outer: Outer, shards: int, *, zero3: bool, sharded: bool) -> float:
        """How much of a unit's states one device holds (asynchronous gradients)."""
        part = 1 / shards + 0.003
        if not sharded:
            return 1.0
        if outer.chunks == 1:
            return part if zero3 else 7 / 8 * part + 1 / 8
        return (7 / 8 * part + 1 / 8) if zero3 else (6 / 8 * part + 2 / 8)

    def layer_mib(self, outer: Outer, layer: Layer, stage: int) -> float:
        """What a layer holds on a device of a stage under 1F1B."""
        data = outer.world // outer.pp // layer.degree
        shards = data * (layer.degree if layer.ulysses else 1)
        tensor = 1 if layer.ulysses else layer.degree
        ratio = self.state_ratio(outer, shards, zero3=layer.zero3, sharded=data > 1)
        samples = outer.microbatch(layer.degree)
        each = self.activation["checkpoint"] / layer.degree if layer.recompute else self.activation[str(layer.degree)]
        return 4 * self.parameter_mib / tensor * ratio + each * samples * (outer.pp - stage)

    def ends_mib(self, outer: Outer, ends: Ends, stage: int) -> float:
        """What embedding, head and the context hold on a device of a stage."""
        names = ["pp_off"] if outer.pp == 1 else ["pp_on_first"] * (stage == 0) + ["pp_on_last"] * (stage == outer.pp - 1)
        shards = outer.world // outer.pp // (1 if ends.ulysses else ends.degree)
        tensor = 1 if ends.ulysses else ends.degree
        ratio = self.state_ratio(outer, shards, zero3=ends.zero3, sharded=shards > 1)
        total = 1024.0
        for name in names:
            own, in_flight = self.ends_memory[name], outer.pp if name == "pp_on_first" else 1
            total += own["model_states"][str(tensor)] * ratio
            total += own["activation"][str(ends.degree)] * outer.microbatch(ends.degree) * in_flight
        return total

    def buffer_mib(self, outer: Outer, degree: int) -> float:
        """The all-gather buffer of tensor parallelism."""
        return outer.microbatch(degree) * HIDDEN * SEQ_LEN * 2 / MIB if degree else 0.0


def _line(compute: dict[str, float], kind: str) -> tuple[float, float]:
    """(slope, start) of the forward milliseconds over samples."""
    samples = np.arange(1, 13)
    times = [compute[f"layertype_{kind}_bsz{b}_seq{SEQ_LEN}"] * b for b in samples]
    slope, start = np.polyfit(samples, times, 1)
    return float(slope), float(start)


def _at(line: tuple[float, float], samples: float) -> float:
    return line[0] * samples + line[1]


def _slowed(compute: float, communication: float, overlap: float) -> float:
    if communication > compute * overlap:
        return communication
    return communication + compute - communication / overlap


def _pipeline_ms(busy: Sequence[float], synced: Sequence[float], chunks: int) -> float:
    """Galvatron's pipeline formula over the stages' seconds of one microbatch, without and with gradient reduction."""
    p, m, first, later = len(busy), chunks, busy[0], sum(busy[1:])
    fill = min(p - 1, m - 1)
    bound = max(fill * first / 3, later / 3) + max(fill * 2 * first / 3, 2 * later / 3) + first * max(0, m + 1 - p)
    total = max(sum(busy) + busy[-1] * (m - 1), bound)
    return total + max(0.0, max(y - sum(busy[: i + 1]) for i, y in enumerate(synced)))
