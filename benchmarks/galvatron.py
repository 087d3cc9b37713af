"""Side by side with Hetu-Galvatron 3.0's search: its profile files, its cost formulas, its plans, and galv's solver.

    python benchmarks/galvatron.py --data DIR

DIR holds `inputs/` (profile files of the Galvatron repository, as they are) and `results/*.json` (one search each:
arguments, plan, predicted throughput, CPU seconds). The cost table is built from the inputs by Galvatron's formulas,
defects and all, so both plans are scored by the same figure, its own predicted step time T. T leaves re-sharding
between layers out; its search charges it a hundred times too high. Here both plans also show what re-sharding takes
at the physical constant.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, product
from math import ceil, inf
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
        compute, memory = (
            self._read("computation_profiling_bf16_llama2-7b_all"),
            self._read("memory_profiling_bf16_llama2-7b_all"),
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
        sizes = self._sizes(kind, degree)
        share = 0.5 if kind == "allreduce" else 1.0
        if mib in sizes:
            return share * sizes[int(mib)]
        return share * _at(self._fit(kind, degree), mib)

    @lru_cache(maxsize=64)  # noqa: B019  # lives as long as the program
    def _sizes(self, kind: str, degree: int) -> dict[int, float]:
        start = f"{kind}_size_{degree}_"
        return {int(name.split("_")[3][:-2]): ms for name, ms in self.tensor_times.items() if name.startswith(start)}

    @lru_cache(maxsize=64)  # noqa: B019  # lives as long as the program
    def _fit(self, kind: str, degree: int) -> tuple[float, float]:
        sizes = self._sizes(kind, degree)
        slope, start = np.polyfit(list(sizes), list(sizes.values()), 1)
        return float(slope), float(start)

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
        return float(ceil(4 * self.parameter_mib / tensor * ratio + each * samples * (outer.pp - stage)))

    def ends_mib(self, outer: Outer, ends: Ends, stage: int) -> float:
        """What embedding, head and the context hold on a device of a stage."""
        names = (
            ["pp_off"] if outer.pp == 1 else ["pp_on_first"] * (stage == 0) + ["pp_on_last"] * (stage == outer.pp - 1)
        )
        shards = outer.world // outer.pp // (1 if ends.ulysses else ends.degree)
        tensor = 1 if ends.ulysses else ends.degree
        ratio = self.state_ratio(outer, shards, zero3=ends.zero3, sharded=shards > 1)
        total = 1024.0
        for name in names:
            own, in_flight = self.ends_memory[name], outer.pp if name == "pp_on_first" else 1
            total += own["model_states"][str(tensor)] * ratio
            total += own["activation"][str(ends.degree)] * outer.microbatch(ends.degree) * in_flight
        return float(ceil(total))

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


# ----------------------------------------------------------------------------------------------- galv's solver


@dataclass(frozen=True)
class Case:
    """One search of Galvatron's: what it was asked, what it found."""

    name: str
    choice: Choice
    cpu_seconds: float
    predicted_seconds: float
    budget_mib: float
    chunks: tuple[int, ...]
    max_pp: int

    @classmethod
    def read(cls, path: Path) -> Case:
        """The case of a results file."""
        found = json.loads(path.read_text())
        plan, args = found["plan"], found["args"]
        columns = [map(int, plan[key].split(",")) for key in ("tp_sizes_enc", "use_sp", "dp_types_enc", "checkpoint")]
        layers = tuple(Layer(t, bool(s), bool(z), bool(c)) for t, s, z, c in zip(*columns, strict=True))
        head = found["result_lines"][0]
        buffer_degree = 0 if "sp_only" in head else int(head.rsplit("=", 1)[1])
        outer = Outer(plan["world_size"], plan["global_bsz"], plan["chunks"], plan["pp_deg"])
        division = tuple(map(int, plan["pp_division"].split(",")))
        ends = Ends(plan["vtp"], bool(plan["vsp"]), bool(plan["embed_sdp"]))
        gb = int(args["mem"])
        return cls(
            name=found["name"],
            choice=Choice(outer, ends, division, layers, buffer_degree),
            cpu_seconds=found["search_cpu_s"],
            predicted_seconds=outer.batch / found["predicted_throughput_samples_per_s"],
            # A fifth is set aside for the caching allocator where there is more than 20 GB.
            budget_mib=gb * 1024 * (0.8 if gb > 20 else 1.0),
            chunks=(int(args["chunk"]),) if "chunk" in args else tuple(divisors(outer.batch)),
            max_pp=int(args.get("max_pp", 8)),
        )


@dataclass(frozen=True)
class Candidate:
    """One outer choice, the layers' options under it, and the ends that may be the best."""

    outer: Outer
    buffer_degree: int
    layers: tuple[Layer, ...]
    ends: tuple[Ends, ...]
    bound_ms: float


def solve(costs: Costs, case: Case) -> Choice | None:
    """The best plan by T with galv's inner solver; where T ties or leaves re-sharding out, that counts as it is."""
    size, best, least = len(case.choice.layers), None, inf
    for candidate in sorted(_candidates(costs, case, size), key=lambda one: one.bound_ms):
        if candidate.bound_ms >= least:
            break
        for division in _divisions(size, candidate.outer.pp):
            for choice in _plans(costs, case, candidate, division, least):
                seconds = costs.step_ms(choice) + costs.resharding_ms(choice.outer, choice.layers)
                if seconds < least:
                    best, least = choice, seconds
    return best


def _candidates(costs: Costs, case: Case, size: int) -> Iterator[Candidate]:
    world, batch = case.choice.outer.world, case.choice.outer.batch
    for chunks in case.chunks:
        for pp in (2**k for k in range(7)):
            if pp > min(case.max_pp, size, chunks) or world % pp:
                continue
            outer = Outer(world, batch, chunks, pp)
            degrees = [d for d in (1, 2, 4, 8) if d <= world // pp and outer.microbatch(d)]
            # A larger buffer costs memory and allows larger Megatron degrees; 0 stands for none of them and no buffer.
            for buffer_degree in (0, *degrees):
                layers = tuple(_layers(outer, degrees, buffer_degree))
                ends = tuple(_ends(outer, degrees, buffer_degree))
                if layers and ends:
                    least = min(costs.layer_ms(outer, layer, size, sync=False) for layer in layers)
                    most = min(sum(costs.ends_ms(outer, one)) for one in ends)
                    yield Candidate(outer, buffer_degree, layers, ends, chunks * (size * least + most) / pp)


def _layers(outer: Outer, degrees: Sequence[int], buffer_degree: int) -> Iterator[Layer]:
    for degree, ulysses, zero3, recompute in product(degrees, (False, True), (False, True), (False, True)):
        possible = degree > 1 if ulysses else degree <= max(buffer_degree, 1)
        # Galvatron shards only where there are data-parallel groups, though Ulysses ranks could shard as well.
        if possible and not (zero3 and outer.world // outer.pp == degree):
            yield Layer(degree, ulysses, zero3, recompute)


def _ends(outer: Outer, degrees: Sequence[int], buffer_degree: int) -> Iterator[Ends]:
    for degree, ulysses, zero3 in product(degrees, (False, True), (False, True)):
        possible = degree > 1 if ulysses else degree <= max(buffer_degree, 1)
        if possible and not (zero3 and outer.world // outer.pp == degree):
            yield Ends(degree, ulysses, zero3)


def _divisions(size: int, pp: int) -> list[tuple[int, ...]]:
    """Galvatron's division, with what is over on the last stage, and the even one."""
    each, over = divmod(size, pp)
    return list({(each,) * (pp - 1) + (each + over,), (each + 1,) * over + (each,) * (pp - over)})


def _plans(costs: Costs, case: Case, candidate: Candidate, division: tuple[int, ...], least: float) -> Iterator[Choice]:
    """Plans of one candidate: for each ends the layers that are fastest by two weights of the gradient reduction."""
    outer, size, ends = candidate.outer, len(case.choice.layers), candidate.ends
    tried: list[tuple[float, ...]] = []
    for one in sorted(ends, key=lambda e: sum(costs.ends_ms(outer, e))):
        own = sum(costs.ends_ms(outer, one))
        held = tuple(costs.ends_mib(outer, one, stage) for stage in range(outer.pp))
        if any(all(a <= b for a, b in zip(other, held, strict=True)) for other in tried):
            continue
        tried.append(held)
        free = [case.budget_mib - costs.buffer_mib(outer, candidate.buffer_degree) - mib for mib in held]
        stages = [_assigner(costs, outer, candidate.layers, size, stage) for stage in range(outer.pp)]
        if outer.chunks * (own + _relaxed_ms(stages, division, free)) / outer.pp >= least:
            continue
        # T is at least all microbatches through any one stage.
        at_most = least / outer.chunks if outer.pp > 1 else least / outer.chunks - own * (1 - 1 / outer.chunks)
        for weight in (0.0, 1 / outer.chunks):
            found = [
                assigner.fastest(
                    (("layer", number),),
                    in_flight=1,
                    weights=(1.0, 0.0, weight),
                    usable_bytes=available,
                    at_most=at_most,
                )
                for assigner, number, available in zip(stages, division, free, strict=True)
            ]
            if all(choice is not None for choice in found):
                options = [option for choice in found if choice is not None for _, option in choice.units()]
                layers = tuple(candidate.layers[option.strategy.tp - 1] for option in options)
                yield Choice(outer, one, division, layers, candidate.buffer_degree)


def _relaxed_ms(stages: Sequence[Assigner], division: Sequence[int], free: Sequence[float]) -> float:
    """The least milliseconds of all stages together, by the relaxation."""
    weights = (1.0, 0.0, 0.0)
    return sum(
        assigner.relaxed_seconds((("layer", number),), in_flight=1, weights=weights, usable_bytes=available)
        for assigner, number, available in zip(stages, division, free, strict=True)
    )


@lru_cache(maxsize=4096)
def _assigner(costs: Costs, outer: Outer, layers: tuple[Layer, ...], size: int, stage: int) -> Assigner:
    """galv's solver on the layers' options: forward stands for all of a microbatch, and its strategy for a number."""
    options = []
    for number, layer in enumerate(layers):
        alone, synced = (costs.layer_ms(outer, layer, size, sync=sync) for sync in (False, True))
        options.append(
            Option(
                strategy=GalvStrategy(tp=number + 1),
                forward_seconds=alone,
                backward_seconds=0.0,
                step_seconds=synced - alone,
                state_bytes=costs.layer_mib(outer, layer, stage),
                activation_bytes=0.0,
                working_bytes=0.0,
                layout=layer.degree,
            )
        )
    degrees = sorted({layer.degree for layer in layers})
    change = {
        (a, b): (costs.change_ms(outer, Layer(a, False, False, False), Layer(b, False, False, False)), 0.0)
        for a, b in product(degrees, degrees)
        if a != b
    }
    return Assigner({"layer": tuple(options)}, change)


# ----------------------------------------------------------------------------------------------- the table


def described(choice: Choice) -> str:
    """A plan in a few words."""
    names = []
    for layer, run in groupby(choice.layers):
        kind = "sp" if layer.ulysses else "tp"
        zero = "zero3" if layer.zero3 else "zero2"
        names.append(f"{len(list(run))}x{kind}{layer.degree} {zero}{' recompute' if layer.recompute else ''}")
    return f"chunks {choice.outer.chunks} pp {choice.outer.pp} " + ", ".join(names)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="inputs/ and results/ of Galvatron")
    parser.add_argument("--plans", action="store_true", help="print both plans of every case")
    asked = parser.parse_args()
    print("step seconds by Galvatron's own T; +r: with re-sharding at the physical constant; ratio: ours to theirs")
    titles = ["case", "theirs", "+r", "ours", "+r", "ratio", "their CPU s", "ours", "times"]
    print("{:34} {:>8} {:>8} {:>8} {:>8} {:>7} {:>11} {:>7} {:>6}".format(*titles))
    worst, slowest = 0.0, inf
    for path in sorted((asked.data / "results").glob("*.json")):
        case = Case.read(path)
        costs = Costs(asked.data / "inputs", case.choice.outer.world // 8)
        theirs = costs.step_ms(case.choice) / 1e3
        assert abs(theirs / case.predicted_seconds - 1) < 1e-6, f"{case.name}: the formula gives {theirs}"
        started = time.process_time()
        ours = solve(costs, case)
        cpu = time.process_time() - started
        assert ours is not None, case.name
        step = costs.step_ms(ours) / 1e3
        more = [costs.resharding_ms(one.outer, one.layers) / 1e3 for one in (case.choice, ours)]
        ratio, faster = step / theirs, case.cpu_seconds / cpu
        worst = max(worst, ratio)
        slowest = min(slowest, faster) if "fine" in case.name and case.cpu_seconds > 1 else slowest
        figures = f"{theirs:8.4f} {theirs + more[0]:8.4f} {step:8.4f} {step + more[1]:8.4f} {ratio:7.4f}"
        print(f"{case.name:34} {figures} {case.cpu_seconds:11.2f} {cpu:7.3f} {faster:6.0f}", flush=True)
        if asked.plans:
            print(f"    theirs: {described(case.choice)}\n    ours:   {described(ours)}")
    print(f"worst ratio {worst:.4f}; least CPU saving in fine-grained searches {slowest:.0f} times")


if __name__ == "__main__":
    main()
