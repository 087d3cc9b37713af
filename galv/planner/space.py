"""Which strategies exist for a model on a cluster, and why others do not.

An outer candidate is a pipeline degree that divides the devices, a schedule with its number of model chunks on each
rank, and a number of microbatches. Inside, on the devices D of a stage, a unit's strategy is

* a tensor degree that divides D and the devices of a node, with or without sequence-sharded activations between the
  tensor-parallel regions (blocks), or a context axis of any divisor of the rest (blocks; Ulysses or ring);
* data parallelism on what is left, for microbatches of whole samples, its states cut over all or over neighbours in a
  node;
* ZeRO 0 to 3; for experts, any share-out over the data ranks;
* for blocks, recompute none, selective or full;
* what is offloaded to the host's memory.

On a single stage every unit chooses for itself. In a pipeline the blocks share their degrees, each choice of which is a
candidate of its own (`Candidate.uniform`), and what stands at the model's ends chooses for itself. Where a microbatch
and a context axis can be divided by one number, so many data-parallel groups in place of context ranks hold and compute
as much, and send nothing within attention: such axes are left out. `RUNS` says what of the space the runtime runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from galv.cost_models.data_parallel import Sharing, fits_together
from galv.cost_models.strategies import Row
from galv.cost_models.unit import Degrees, FactsPricer, Outer
from galv.cost_models.work import Setting
from galv.errors import UsageError
from galv.planner.graph import ModelGraph
from galv.planner.plan import Offload, OptimizerName, Precision, Recompute, ScheduleName, SequenceMode
from galv.profiles.cluster import ClusterProfile

RECOMPUTE_LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    ("activations",),
    ("optimizer",),
    ("activations", "optimizer"),
    ("optimizer", "parameters"),
    ("activations", "optimizer", "parameters"),
)
"""What can be offloaded together: parameters only with the optimizer, which updates them where they lie."""


@dataclass(frozen=True)
class Features:
    """Parts of the space that can be left out."""

    mixed_degrees: bool = False
    """Units of one plan differ in their tensor, context and data degrees: all on a single stage, the model's ends and
    its blocks in a pipeline. Context degrees need it: what stands around the blocks has none."""
    ulysses: bool = False
    ring: bool = False
    hybrid: bool = False
    """Shards and replicas of a unit's states."""
    experts: bool = False
    offload: bool = False
    interleaved: bool = False
    zero_bubble: bool = False


RUNS = Features(
    mixed_degrees=True, ulysses=True, ring=True, hybrid=True, experts=True, interleaved=True, zero_bubble=True
)
"""What galv's runtime runs."""
EVERYTHING = Features(*[True] * 8)
MAX_CHUNKS = 8
"""Of a rank: twice as many would shorten the bubble by less than a sixteenth of that of 1F1B."""
MAX_CONTEXT = 32
"""Ranks of a context axis: parts of a sequence get too short to be worth a search."""


@dataclass(frozen=True)
class Request:
    """What the user asked to train."""

    global_batch: int
    seq_len: int | None
    precision: Precision
    optimizer: OptimizerName
    budget_bytes: int
    """Per device."""


@dataclass(frozen=True)
class Candidate:
    """One outer choice."""

    outer: Outer
    num_devices: int
    """Of a stage."""
    uniform: Degrees | None = None
    """The degrees that all blocks have, and all other units but free ends; None where each unit chooses."""
    features: Features = RUNS


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending; by its prime factors, as a number may have 40 bits."""
    found = [1]
    for prime, times in _prime_factors(number):
        found = [d * prime**power for d in found for power in range(times + 1)]
    return sorted(found)


def _prime_factors(number: int) -> Iterator[tuple[int, int]]:
    """The primes that divide `number`, ascending, each with how often."""
    prime = 2
    while prime * prime <= number:
        times = 0
        while number % prime == 0:
            number, times = number // prime, times + 1
        if times:
            yield prime, times
        prime += 1 if prime == 2 else 2
    if number > 1:
        yield number, 1


def listed(numbers: Iterable[int], most: int = 12) -> str:
    """`numbers` in words, ascending; of a long list the smallest and the largest."""
    ordered = [str(number) for number in sorted(numbers)]
    if len(ordered) > most:
        ordered = [*ordered[: most - 2], "...", *ordered[-2:]]
    return ", ".join(ordered)


# ----------------------------------------------------------------------------------------------- outer choices


def candidates(
    graph: ModelGraph, cluster: ClusterProfile, request: Request, features: Features = RUNS
) -> list[Candidate]:
    """Every outer choice. Raises UsageError when the global batch fits no number of data-parallel groups."""
    found = [
        Candidate(outer_of(request, pp, rounds, schedule, chunks), cluster.num_devices // pp, uniform, features)
        for pp in pipeline_degrees(graph, cluster)
        for uniform, counts in _divisions(graph, cluster, request, pp, features)
        for rounds in counts
        for schedule, chunks in schedules(graph, pp, rounds, features)
    ]
    if not found:
        raise UsageError(_no_candidate(graph, cluster, request))
    return found


def _divisions(
    graph: ModelGraph, cluster: ClusterProfile, request: Request, pp: int, features: Features
) -> Iterator[tuple[Degrees | None, Sequence[int]]]:
    """Degrees that blocks share (or None), with the numbers of microbatches that they allow."""
    num_devices, batch = cluster.num_devices // pp, request.global_batch
    degrees = tensor_degrees(num_devices, cluster)
    # What stands around the blocks has no context axis, so its data degree decides whether any choice is left.
    shares = {num_devices // tp for tp in degrees if batch % (num_devices // tp) == 0}
    if features.mixed_degrees and pp == 1:
        yield None, sorted({rounds for dp in shares for rounds in divisors(batch // dp)})
        return
    for tp in degrees:
        if num_devices // tp in shares:
            for sequence in sequence_modes(tp):
                yield Degrees(tp, sequence), divisors(batch // (num_devices // tp))
    if features.mixed_degrees and has_free_ends(graph):
        for tp in degrees:
            for context in context_degrees(tp, num_devices, features):
                dp, most = num_devices // context.num_ranks, max(shares, default=0)
                if batch % dp == 0 and most:
                    rounds = (n for n in divisors(batch // dp) if context_pays(context, batch // (dp * n)))
                    yield context, [n for n in rounds if any(batch % (share * n) == 0 for share in shares)]


def context_degrees(tp: int, num_devices: int, features: Features) -> Iterator[Degrees]:
    """The context axes beside a tensor axis."""
    modes: list[SequenceMode] = ["ulysses"] if features.ulysses else []
    modes += ["ring"] if features.ring else []
    for cp, mode in product(divisors(num_devices // tp)[1:], modes):
        if cp <= MAX_CONTEXT:
            yield Degrees(tp, mode, cp)


def context_pays(degrees: Degrees, microbatch: int) -> bool:
    """Whether a context axis does what data parallelism on its ranks could not."""
    return gcd(degrees.cp, microbatch) == 1


def has_free_ends(graph: ModelGraph) -> bool:
    """Whether the model's first and last unit, and no others, stand around its blocks and may differ from them.

    Tied ends share a tensor, and so their degrees; beyond that they are as the blocks are.
    """
    kinds = [is_block(graph, unit.unit_class) for unit in graph.units]
    stands_around = len(kinds) > 2 and not kinds[0] and not kinds[-1] and all(kinds[1:-1])
    return stands_around and not graph.tied_units and skip(graph) is None


def outer_of(
    request: Request, pp: int, num_microbatches: int, schedule: ScheduleName = "none", virtual_stages: int = 1
) -> Outer:
    """The outer choice of the given numbers under `request`."""
    return Outer(
        pp=pp,
        num_microbatches=num_microbatches,
        global_batch=request.global_batch,
        precision=request.precision,
        optimizer=request.optimizer,
        schedule=schedule,
        virtual_stages=virtual_stages,
    )


def schedules(
    graph: ModelGraph, pp: int, num_microbatches: int, features: Features = RUNS
) -> list[tuple[ScheduleName, int]]:
    """The schedules of a pipeline, each with the model chunks of a rank.

    With fewer microbatches than stages all others would be GPipe. Chunks take equally many blocks, give or take one.
    """
    if pp == 1:
        return [("none", 1)]
    if num_microbatches < pp:
        return [("gpipe", 1)]
    found: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("gpipe", 1)]
    if features.interleaved:
        found += [("interleaved", chunks) for chunks in virtual_degrees(graph, pp)]
    if features.zero_bubble:
        found.append(("zb-h1", 1))
    if features.zero_bubble and 2 * pp <= len(graph.units):
        found.append(("zbv", 2))
    return found


def virtual_degrees(graph: ModelGraph, pp: int) -> list[int]:
    """Chunks that a rank of an interleaved pipeline can have: divisors of its blocks, 2 or more, but not many more."""
    blocks = -(-max(graph.counts.values()) // pp)
    return [chunks for chunks in divisors(blocks) if 1 < chunks <= MAX_CHUNKS and pp * chunks <= len(graph.units)]


def pipeline_degrees(graph: ModelGraph, cluster: ClusterProfile) -> list[int]:
    """Divisors of the devices; only 1 for a model that cannot be cut."""
    most = 1 if graph.no_pipeline else len(graph.units)
    return [pp for pp in divisors(cluster.num_devices) if pp <= most]


def describe(candidate: Candidate) -> str:
    """A candidate in a few words."""
    outer, uniform = candidate.outer, candidate.uniform
    chunks = f" x{outer.virtual_stages}" if outer.virtual_stages > 1 else ""
    pipeline = [f"pp{outer.pp} {outer.schedule}{chunks}"] if outer.pp > 1 else []
    if uniform is None:
        return " ".join([*pipeline, f"{outer.num_microbatches} microbatches"])
    dp = candidate.num_devices // uniform.num_ranks
    parts = [f"tp{uniform.tp}" + ("+seq" if uniform.sequence == "megatron" else "")] if uniform.tp > 1 else []
    parts += [f"{uniform.sequence}{uniform.cp}"] if uniform.cp > 1 else []
    parts += [*pipeline, *([f"dp{dp}"] if dp > 1 else [])]
    return " ".join([*parts, f"microbatch {outer.microbatch(dp)}"])


def setting_for(
    request: Request, *, tp: int, sequence: SequenceMode, dp: int, pp: int, num_microbatches: int
) -> Setting:
    """What all units share where another software trains with the given degrees."""
    return Setting(
        tp=tp,
        sequence=sequence,
        dp=dp,
        pp=pp,
        num_microbatches=num_microbatches,
        microbatch=request.global_batch // (dp * num_microbatches),
        precision=request.precision,
        optimizer=request.optimizer,
    )


def _no_candidate(graph: ModelGraph, cluster: ClusterProfile, request: Request) -> str:
    groups = {
        cluster.num_devices // (pp * tp)
        for pp in pipeline_degrees(graph, cluster)
        for tp in tensor_degrees(cluster.num_devices // pp, cluster)
    }
    least = min(groups)
    return (
        f"global batch {request.global_batch} cannot be shared out on {cluster.num_devices} devices: it must be a "
        f"multiple of the number of data-parallel groups, which can be {listed(groups)} here. "
        f"A multiple of {least} would work, such as {max(1, round(request.global_batch / least)) * least}"
    )


# ----------------------------------------------------------------------------------------------- a unit's choices


def is_block(graph: ModelGraph, unit_class: str) -> bool:
    """Whether units of the class are repeated blocks, not what stands around them."""
    name = next(unit.name for unit in graph.units if unit.unit_class == unit_class)
    return name not in ("embedding", "head") and " " not in name


def sequence_modes(tp: int) -> tuple[SequenceMode, ...]:
    """The sequence modes for a tensor degree alone."""
    return ("none",) if tp == 1 else ("megatron", "none")


def zero_levels(num_ranks: int) -> tuple[int, ...]:
    """The ZeRO levels for so many ranks that share parameters; with one there is nothing to shard over."""
    return (0,) if num_ranks == 1 else (0, 1, 2, 3)


def recompute_levels(graph: ModelGraph, unit_class: str) -> tuple[Recompute, ...]:
    """What a unit class can recompute: only a unit that is one module can run its forward again."""
    unit = next(unit for unit in graph.units if unit.unit_class == unit_class)
    is_module = len(unit.modules) == 1 and not unit.parameters and unit.name not in ("embedding", "head")
    return RECOMPUTE_LEVELS if is_module and len(graph.units) > 1 else ("none",)


def tensor_degrees(stage_devices: int, cluster: ClusterProfile) -> list[int]:
    """Tensor degrees of a stage: divisors whose group never leaves a node."""
    return [tp for tp in divisors(stage_devices) if cluster.devices_per_node % tp == 0]


def degrees_of(
    graph: ModelGraph, unit_class: str, num_devices: int, cluster: ClusterProfile, features: Features
) -> Iterator[Degrees]:
    """How the computation of a unit can be divided on `num_devices`, whether or not the model has placements for it."""
    block = is_block(graph, unit_class)
    for tp in tensor_degrees(num_devices, cluster):
        for sequence in sequence_modes(tp) if block else ("none",):
            yield from _with_experts(graph, Degrees(tp, sequence), unit_class, num_devices, features)
        for degrees in context_degrees(tp, num_devices, features) if block else ():
            yield from _with_experts(graph, degrees, unit_class, num_devices, features)


def _with_experts(
    graph: ModelGraph, degrees: Degrees, unit_class: str, num_devices: int, features: Features
) -> Iterator[Degrees]:
    """`degrees` with every expert degree that divides the data ranks and the experts."""
    # The runtime shares experts out over data ranks, which a context axis would lie between.
    experts = graph.classes[unit_class].experts if features.experts and degrees.cp == 1 else 0
    for ep in divisors(num_devices // degrees.num_ranks) if experts else (1,):
        if not experts or experts % ep == 0:
            yield Degrees(degrees.tp, degrees.sequence, degrees.cp, ep)


def sharings(degrees: Degrees, dp: int, devices_per_node: int, features: Features) -> Iterator[Sharing]:
    """How `dp` data ranks can hold a unit's states: cut over all of them, or over neighbours within a node.

    With a context axis they are cut over that, too.
    """
    near = [shard for shard in divisors(dp) if shard == dp or shard * degrees.num_ranks <= devices_per_node]
    for zero in zero_levels(dp * degrees.cp):
        for shard in near if zero and features.hybrid else (dp if zero else 1,):
            sharing = Sharing(shard, dp // shard, zero)
            cuts = zero == 0 or shard * degrees.cp > 1
            if cuts and (degrees.ep == 1 or fits_together(degrees, sharing)):
                yield sharing


def offloads(zero: int, *, features: Features, can_keep_less: bool = True) -> list[tuple[Offload, ...]]:
    """What a unit of that ZeRO level can offload.

    Parameters only where they are gathered for the moment, under ZeRO 3: there they go with the optimizer.
    """
    if not features.offload:
        return [()]
    return [
        what
        for what in OFFLOADS
        if ("parameters" in what) == (zero == 3 and "optimizer" in what)
        and ("activations" not in what or can_keep_less)
    ]


def rows(shared: FactsPricer, candidate: Candidate, unit_class: str) -> list[Row]:
    """Every strategy of a unit class in a candidate, but for what is recomputed."""
    graph, outer, features = shared.graph, candidate.outer, candidate.features
    block = is_block(shared.graph, unit_class)
    found = []
    for degrees in degrees_in(shared, candidate, unit_class):
        dp = candidate.num_devices // degrees.num_ranks
        samples = outer.microbatch(dp)
        if samples is None or not context_pays(degrees, samples):
            continue
        if shared.exclusion(unit_class, degrees) is not None:
            continue
        for sharing in sharings(degrees, dp, shared.cluster.devices_per_node, features):
            found += [
                Row(degrees, sharing, what)
                for what in offloads(sharing.zero, features=features, can_keep_less=block and len(graph.units) > 1)
            ]
    return found


def degrees_in(shared: FactsPricer, candidate: Candidate, unit_class: str) -> Iterator[Degrees]:
    """How a unit of the class can be divided in a candidate, whether or not the model has placements for it."""
    graph, features, num_devices = shared.graph, candidate.features, candidate.num_devices
    if candidate.uniform is None or chooses(graph, candidate, unit_class):
        return degrees_of(graph, unit_class, num_devices, shared.cluster, features)
    return _with_experts(graph, candidate.uniform, unit_class, num_devices, features)


def chooses(graph: ModelGraph, candidate: Candidate, unit_class: str) -> bool:
    """Whether units of the class have degrees of their own choice in `candidate`."""
    if candidate.uniform is None:
        return True
    return candidate.features.mixed_degrees and not is_block(graph, unit_class) and has_free_ends(graph)


# ----------------------------------------------------------------------------------------------- what is left out


def impossible(shared: FactsPricer, candidate: Candidate) -> str | None:
    """Why the units that share their degrees in `candidate` cannot have them; None where they can."""
    graph, degrees = shared.graph, candidate.uniform
    if degrees is None:
        return None
    if not candidate.features.mixed_degrees or not has_free_ends(graph):
        return exclusion(shared, degrees)
    reasons = (shared.exclusion(name, degrees) for name in graph.classes if is_block(graph, name))
    return next((reason for reason in reasons if reason is not None), None)


def exclusion(shared: FactsPricer, degrees: Degrees) -> str | None:
    """Why not all units of the model can share these degrees; None where they can."""
    for name in shared.graph.classes:
        reason = shared.exclusion(name, degrees)
        if reason is not None:
            return reason
    return skip(shared.graph) if degrees.sequence == "megatron" else None


def skip(graph: ModelGraph) -> str | None:
    """Why neighbours must lay their activations alike: one goes past its neighbour, where it must be whole."""
    for edge in graph.edges:
        far = [consumer for consumer in edge.consumers if consumer > edge.producer + 1]
        if far:
            names = graph.units[edge.producer].name, graph.units[far[0]].name
            return f"sequence sharding: {names[0]} also feeds {names[1]}, past its neighbour"
    return None


def exclusions(shared: FactsPricer, request: Request, features: Features = RUNS) -> list[tuple[str, str]]:
    """(strategies, why they are not searched) for every family of strategies that is left out."""
    return [
        *_switched_off(features),
        *_unknown_placements(shared, features),
        *_not_dividing(shared, request),
    ]


def _switched_off(features: Features) -> Iterator[tuple[str, str]]:
    families = (
        ("mixed_degrees", "units of different tp, cp or dp in one plan"),
        ("ulysses", "sequence=ulysses"),
        ("ring", "sequence=ring"),
        ("hybrid", "zero>=1 with dp_replicate>1"),
        ("experts", "ep>1"),
        ("offload", "offload"),
        ("interleaved", "schedule=interleaved"),
        ("zero_bubble", "schedule=zb-h1, zbv"),
    )
    for name, pattern in families:
        if not getattr(features, name):
            yield pattern, "galv's runtime does not run it"


def _unknown_placements(shared: FactsPricer, features: Features) -> Iterator[tuple[str, str]]:
    """Degrees that some unit class has no placements for, on the devices of the whole cluster."""
    graph, cluster = shared.graph, shared.cluster
    if graph.no_pipeline:
        yield "pp>1", graph.no_pipeline
    for name in graph.classes:
        for degrees in degrees_of(graph, name, cluster.num_devices, cluster, features):
            reason = shared.exclusion(name, degrees)
            if reason is not None:
                yield f"{name}: {pattern_of(degrees)}", reason
    passing = skip(graph)
    if passing is not None:
        yield "sequence=megatron, and units of different layouts side by side", passing
    if features.mixed_degrees and cluster.num_devices > 1 and not graph.no_pipeline:
        yield "pp>1: blocks of different tp, cp or dp", "each choice that all blocks share is searched by itself"


def pattern_of(degrees: Degrees) -> str:
    """Degrees in the words of a strategy."""
    parts = [f"{name}={value}" for name, value in (("tp", degrees.tp), ("cp", degrees.cp), ("ep", degrees.ep))]
    parts = [part for part in parts if not part.endswith("=1")]
    return " ".join([*parts, f"sequence={degrees.sequence}"] if degrees.sequence != "none" else parts) or "tp=1"


def _not_dividing(shared: FactsPricer, request: Request) -> Iterator[tuple[str, str]]:
    cluster = shared.cluster
    node = cluster.devices_per_node
    if cluster.num_nodes > 1:
        yield f"tp>{node}", f"a tensor group of more than {node} devices leaves the node"
        yield "dp_shard over some ranks of several nodes", "over all ranks less is held, and as much leaves each node"
    if cluster.num_devices > MAX_CONTEXT:
        yield f"cp>{MAX_CONTEXT}", f"the search looks at context axes of at most {MAX_CONTEXT} ranks"
    for dp in divisors(cluster.num_devices):
        if request.global_batch % dp:
            yield f"dp={dp}", f"the global batch {request.global_batch} is not a multiple of {dp}"
