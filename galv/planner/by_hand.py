"""A layout that the user gives, checked and priced; nothing is searched but the cut of the pipeline.

Blocks take the degrees as given. What stands around them has no context axis: on those ranks it takes other samples,
or, where a microbatch has too few of them, a larger tensor degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from galv.cost_models.data_parallel import Sharing, fits_together
from galv.cost_models.strategies import Row, class_costs
from galv.cost_models.unit import Degrees, FactsPricer, Outer, UnitCost
from galv.errors import UsageError
from galv.planner.assemble import estimate, plan_of, step_seconds
from galv.planner.balance import Stages, balanced_cuts
from galv.planner.borders import border_seconds, send_seconds, sent_bytes
from galv.planner.plan import Estimate, Offload, Plan, Recompute, ScheduleName, SequenceMode
from galv.planner.space import (
    RUNS,
    Candidate,
    Features,
    Request,
    divisors,
    exclusion,
    is_block,
    listed,
    outer_of,
    recompute_levels,
)
from galv.profiles.cluster import ClusterProfile


@dataclass(frozen=True)
class Layout:
    """Degrees and levels as a user states them; what is left over is data-parallel."""

    tp: int
    pp: int
    zero: int
    micro_batch: int
    sequence: SequenceMode | None
    recompute: Recompute
    schedule: ScheduleName | None
    cp: int = 1
    ep: int = 1
    dp_shard: int | None = None
    """None for all data ranks from zero 1 on, whatever `dp_replicate` leaves if that is given."""
    dp_replicate: int | None = None
    offload: tuple[Offload, ...] = ()
    virtual_stages: int = 1

    def check(self, cluster: ClusterProfile, request: Request, features: Features = RUNS) -> None:
        """Nothing when the degrees divide the cluster and the batch. Raises UsageError saying what would."""
        self.check_numbers()
        self._check_degrees(cluster)
        self._check_batch(cluster, request)
        self._check_names()
        self._check_sharing(cluster)
        self._check_runs(features)

    def check_numbers(self) -> None:
        """Nothing when every number can be meant. Raises UsageError."""
        numbers = {
            "tp": self.tp,
            "pp": self.pp,
            "micro batch": self.micro_batch,
            "cp": self.cp,
            "ep": self.ep,
            "dp_shard": self.dp_shard,
            "dp_replicate": self.dp_replicate,
            "virtual_stages": self.virtual_stages,
        }
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.zero <= 3:
            raise UsageError(f"the ZeRO level is 0, 1, 2 or 3, not {self.zero}")

    @property
    def degrees(self) -> Degrees:
        """How blocks are divided, their sequence mode as stated."""
        return Degrees(self.tp, self.sequence or "none", self.cp, self.ep)

    def dp(self, cluster: ClusterProfile) -> int:
        """Data-parallel groups."""
        return cluster.num_devices // (self.tp * self.pp * self.cp)

    def sharing(self, cluster: ClusterProfile) -> Sharing:
        """How the blocks' data ranks hold their states."""
        dp = self.dp(cluster)
        if not self.zero:
            return Sharing(1, dp, 0)
        shard = self.dp_shard or dp // (self.dp_replicate or 1)
        return Sharing(shard, dp // shard, self.zero)

    def _check_degrees(self, cluster: ClusterProfile) -> None:
        devices, ranks = cluster.num_devices, self.tp * self.pp * self.cp
        if devices % ranks:
            context = f" x cp {self.cp}" if self.cp > 1 else ""
            raise UsageError(
                f"tp {self.tp} x pp {self.pp}{context} = {ranks} does not divide the {devices} devices of "
                f"{cluster.spec}; the product can be {listed(divisors(devices))}"
            )
        if cluster.devices_per_node % self.tp:
            raise UsageError(
                f"tp {self.tp} would leave the node: nodes of {cluster.spec} have {cluster.devices_per_node} devices; "
                f"tp can be {listed(divisors(cluster.devices_per_node))}"
            )

    def _check_batch(self, cluster: ClusterProfile, request: Request) -> None:
        dp = self.dp(cluster)
        if request.global_batch % (dp * self.micro_batch):
            step = dp * self.micro_batch
            near = max(1, round(request.global_batch / step)) * step
            raise UsageError(
                f"global batch {request.global_batch} is not a multiple of {dp} data-parallel groups x micro batch "
                f"{self.micro_batch}; {near} would be"
            )
        if self.zero and dp * self.cp == 1:
            raise UsageError(
                f"zero {self.zero} shards over data-parallel groups, and tp {self.tp} x pp {self.pp} leaves only one; "
                "use zero 0 or smaller degrees"
            )

    def _check_names(self) -> None:
        if self.sequence == "megatron" and self.tp == 1:
            raise UsageError("sequence sharding 'megatron' needs tp > 1")
        if (self.sequence in ("ulysses", "ring")) != (self.cp > 1):
            raise UsageError(
                f"sequence {self.sequence or 'none'} with cp {self.cp}: a context axis, cp > 1, has the sequence mode "
                "ulysses or ring, and only it"
            )
        if self.schedule == "none" and self.pp > 1:
            raise UsageError(f"pp {self.pp} needs a schedule: 1f1b or gpipe")
        if self.schedule not in (None, "none") and self.pp == 1:
            raise UsageError(f"the schedule {self.schedule} is for a pipeline; give pp > 1 with it")
        self._check_chunks()

    def _check_chunks(self) -> None:
        chunks, schedule = self.virtual_stages, self.chosen_schedule
        if chunks > 1 and schedule not in ("interleaved", "zbv"):
            raise UsageError(
                f"virtual_stages {chunks}: only the schedules interleaved and zbv have several chunks a rank"
            )
        if schedule == "interleaved" and chunks == 1:
            raise UsageError("the schedule interleaved needs virtual_stages of 2 or more")
        if schedule == "zbv" and chunks != 2:
            raise UsageError(f"the schedule zbv has virtual_stages 2, not {chunks}")

    @property
    def chosen_schedule(self) -> ScheduleName:
        """1F1B unless said otherwise; interleaved where there are several chunks."""
        if self.pp == 1:
            return "none"
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    def _check_sharing(self, cluster: ClusterProfile) -> None:
        if not self.zero and (self.dp_shard or 1) > 1:
            raise UsageError(f"dp_shard {self.dp_shard} shards nothing at zero 0")
        dp, sharing = self.dp(cluster), self.sharing(cluster)
        stated = (self.dp_shard or sharing.dp_shard) * (self.dp_replicate or sharing.dp_replicate)
        if stated != dp:
            raise UsageError(
                f"dp_shard {self.dp_shard or sharing.dp_shard} x dp_replicate "
                f"{self.dp_replicate or sharing.dp_replicate} is not the data-parallel degree, {dp}"
            )
        if self.ep > 1 and not fits_together(self.degrees, sharing):
            raise UsageError(
                f"ep {self.ep} must divide the {dp} data-parallel ranks, and divide dp_shard {sharing.dp_shard} or be "
                "a multiple of it"
            )
        if "parameters" in self.offload and (self.zero != 3 or "optimizer" not in self.offload):
            raise UsageError("offload of parameters needs zero 3 and offload of the optimizer")

    def _check_runs(self, features: Features) -> None:
        """Nothing when the runtime can run it. Raises UsageError."""
        asked = {
            "ulysses": self.sequence == "ulysses",
            "ring": self.sequence == "ring",
            "hybrid": self.zero > 0 and (self.dp_replicate or 1) > 1,
            "experts": self.ep > 1,
            "offload": bool(self.offload),
            "interleaved": self.chosen_schedule == "interleaved",
            "zero_bubble": self.chosen_schedule in ("zb-h1", "zbv"),
        }
        lacking = [
            name.replace("_", "-") for name, is_asked in asked.items() if is_asked and not getattr(features, name)
        ]
        if lacking:
            raise UsageError(
                f"galv does not run {', '.join(lacking)} yet; with a stack (stack=...) other software's is priced"
            )

    def candidate(self, shared: FactsPricer, request: Request) -> Candidate:
        """The layout in the search's terms: sequence-sharded when that is left open and the model allows it."""
        cluster = shared.cluster
        possible = self.tp > 1 and self.cp == 1 and exclusion(shared, Degrees(self.tp, "megatron")) is None
        rounds = request.global_batch // (self.dp(cluster) * self.micro_batch)
        outer = outer_of(request, self.pp, rounds, self.chosen_schedule, self.virtual_stages)
        sequence = self.sequence or ("megatron" if possible else "none")
        degrees = Degrees(self.tp, sequence, self.cp, self.ep)
        return Candidate(outer, cluster.num_devices // self.pp, degrees)


def priced_by_hand(
    shared: FactsPricer, layout: Layout, request: Request, *, source: str | None, inputs_source: str | None
) -> Plan:
    """The plan of `layout`, whether or not it fits. Raises UsageError when the model has no such layout."""
    outer, stages, found = staged_by_hand(shared, layout, request)
    return plan_of(shared, outer, stages, request, found, source=source, inputs_source=inputs_source)


def staged_by_hand(shared: FactsPricer, layout: Layout, request: Request) -> tuple[Outer, Stages, Estimate]:
    """(what all units share, the stages, the estimate) of `layout`, whether or not anything runs it."""
    num_units, chunks = len(shared.graph.units), layout.pp * layout.virtual_stages
    if chunks > num_units:
        virtual = f" x {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
        raise UsageError(f"pp {layout.pp}{virtual} needs as many units; {shared.graph.name} has {num_units}")
    candidate = layout.candidate(shared, request)
    rows = {name: _row(shared, layout, candidate, name) for name in shared.graph.classes}
    _check_placements(shared, candidate, rows)
    costs = {name: _cost(shared, layout, candidate, rows, name) for name in rows}
    sizes = {
        name: shared.priced(name, row.degrees, _samples(candidate.outer, row)).facts.output_bytes
        for name, row in rows.items()
    }
    sent = send_seconds(shared, candidate, sent_bytes(shared.graph, sizes))
    units = [(ref, costs[ref.unit_class]) for ref in shared.graph.units]
    stages = min(balanced_cuts(candidate.outer, units), key=lambda cut: step_seconds(candidate.outer, cut, sent))
    return candidate.outer, stages, estimate(shared, candidate.outer, stages, sent, request)


def _samples(outer: Outer, row: Row) -> int:
    samples = outer.microbatch(row.sharing.dp)
    assert samples is not None, "checked"
    return samples


def _row(shared: FactsPricer, layout: Layout, candidate: Candidate, unit_class: str) -> Row:
    """The strategy of a unit class."""
    graph, degrees = shared.graph, candidate.uniform
    assert degrees is not None, "given by hand"
    experts = graph.classes[unit_class].experts
    if layout.ep > 1 and experts % layout.ep:
        raise UsageError(f"ep {layout.ep} does not divide the {experts} experts of {unit_class}")
    degrees = degrees if experts else replace(degrees, ep=1)
    sharing = layout.sharing(shared.cluster)
    if degrees.cp == 1 or is_block(graph, unit_class):
        return Row(degrees, sharing, layout.offload)
    # Around the blocks: the context axis' ranks take other samples, else parts of the tensors.
    if candidate.outer.microbatch(sharing.dp * degrees.cp) is not None:
        shard = sharing.dp_shard * degrees.cp if layout.zero else 1
        wide = Sharing(shard, sharing.dp * degrees.cp // shard, layout.zero)
        return Row(Degrees(degrees.tp), wide, layout.offload)
    if shared.cluster.devices_per_node % degrees.num_ranks:
        raise UsageError(
            f"cp {degrees.cp}: a microbatch of {layout.micro_batch} samples is too few for {unit_class} to take other "
            f"samples on those ranks, and tp {degrees.num_ranks} leaves the node; use a larger micro batch"
        )
    zero = layout.zero if sharing.dp > 1 else 0
    return Row(Degrees(degrees.num_ranks), replace(sharing, zero=zero), layout.offload if zero else ())


def _check_placements(shared: FactsPricer, candidate: Candidate, rows: dict[str, Row]) -> None:
    """Nothing when the model has placements for all of it. Raises UsageError."""
    for reason in _missing(shared, candidate, rows):
        raise UsageError(f"this model cannot be split so: {reason}{_without_sequence(shared, candidate)}")


def _missing(shared: FactsPricer, candidate: Candidate, rows: dict[str, Row]) -> Iterator[str]:
    degree = 1 if candidate.uniform is None else candidate.uniform.ep
    if degree > 1 and all(row.degrees.ep == 1 for row in rows.values()):
        yield f"ep {degree}: {_no_experts(shared, degree)}"
    for name, row in rows.items():
        reason = shared.exclusion(name, row.degrees)
        if reason is not None:
            yield reason
    degrees = candidate.uniform
    if degrees is not None and degrees.cp == 1:
        # Only some units have experts; theirs are among the rows.
        reason = exclusion(shared, replace(degrees, ep=1))
        if reason is not None:
            yield reason


def _no_experts(shared: FactsPricer, degree: int) -> str:
    """Why the units of which there are most share out no experts."""
    graph = shared.graph
    refused = graph.source.expert_exclusion(max(graph.counts, key=lambda name: graph.counts[name]), degree)
    return refused.reason if refused is not None else "no unit has experts"


def _cost(shared: FactsPricer, layout: Layout, candidate: Candidate, rows: dict[str, Row], unit_class: str) -> UnitCost:
    """The cost of a unit class under its row. Where DistributedDataParallel can run the plan, it does."""
    graph, outer, row = shared.graph, candidate.outer, rows[unit_class]
    level = layout.recompute if layout.recompute in recompute_levels(graph, unit_class) else "none"
    copy = outer.pp == 1 and unit_class in shared.tied_classes and graph.units[0].unit_class != unit_class
    plain = all(r.degrees == Degrees() and r.sharing.zero == 0 and not r.offload for r in rows.values())
    ddp = plain and outer.pp == 1 and outer.precision == "fp32" and candidate.num_devices > 1
    costs = class_costs(shared, unit_class, outer, [row], [level], tied_copy=copy, ddp=ddp)
    degrees = {name: row.degrees for name, row in rows.items()}
    return costs.with_exposed(*border_seconds(shared, outer, candidate.num_devices, unit_class, degrees)).cost(0, 0)


def _without_sequence(shared: FactsPricer, candidate: Candidate) -> str:
    """What to do about a layout that is impossible only because sequences are sharded; nothing to say otherwise."""
    degrees = candidate.uniform
    if degrees is None or degrees.sequence == "none" or exclusion(shared, Degrees(degrees.tp)) is not None:
        return ""
    return f"; tp {degrees.tp} works with whole sequences (--no-sequence-parallel, sequence='none')"
