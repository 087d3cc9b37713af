"""A layout that the user gives, checked and priced; nothing is searched but the cut of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galv.cost_models.unit import FactsPricer
from galv.errors import UsageError
from galv.planner.assemble import assemble
from galv.planner.plan import Plan, Recompute, ScheduleName, SequenceMode
from galv.planner.planner import exclusion
from galv.planner.search.solve import solve
from galv.planner.space import Candidate, Request, divisors, listed, setting_for
from galv.planner.tables import Limits, priced_tables
from galv.profiles.cluster import ClusterProfile

UNLIMITED_BYTES = 1e60


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

    def check(self, cluster: ClusterProfile, request: Request) -> None:
        """Nothing when the degrees divide the cluster and the batch. Raises UsageError saying what would."""
        self.check_numbers()
        self._check_degrees(cluster)
        self._check_batch(cluster, request)
        self._check_names()

    def check_numbers(self) -> None:
        """Nothing when every number can be meant. Raises UsageError."""
        for name, value in (("tp", self.tp), ("pp", self.pp), ("micro batch", self.micro_batch)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.zero <= 3:
            raise UsageError(f"the ZeRO level is 0, 1, 2 or 3, not {self.zero}")

    def dp(self, cluster: ClusterProfile) -> int:
        """Data-parallel groups."""
        return cluster.num_devices // (self.tp * self.pp)

    def _check_degrees(self, cluster: ClusterProfile) -> None:
        devices = cluster.num_devices
        if devices % (self.tp * self.pp):
            raise UsageError(
                f"tp {self.tp} x pp {self.pp} = {self.tp * self.pp} does not divide the {devices} devices of "
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
        if self.zero and dp == 1:
            raise UsageError(
                f"zero {self.zero} shards over data-parallel groups, and tp {self.tp} x pp {self.pp} leaves only one; "
                "use zero 0 or smaller degrees"
            )

    def _check_names(self) -> None:
        if self.sequence == "megatron" and self.tp == 1:
            raise UsageError("sequence sharding 'megatron' needs tp > 1")
        if self.schedule == "none" and self.pp > 1:
            raise UsageError(f"pp {self.pp} needs a schedule: 1f1b or gpipe")
        if self.schedule not in (None, "none") and self.pp == 1:
            raise UsageError(f"the schedule {self.schedule} is for a pipeline; give pp > 1 with it")

    def candidate(self, shared: FactsPricer, request: Request) -> Candidate:
        """The layout in the search's terms: sequence-sharded when that is left open and the model allows it."""
        cluster = shared.cluster
        dp = self.dp(cluster)
        possible = self.tp > 1 and exclusion(shared, self.tp, "megatron") is None
        setting = setting_for(
            request,
            tp=self.tp,
            sequence=self.sequence or ("megatron" if possible else "none"),
            dp=dp,
            pp=self.pp,
            num_microbatches=request.global_batch // (dp * self.micro_batch),
        )
        return Candidate(setting, "none" if self.pp == 1 else self.schedule or "1f1b")


def priced_by_hand(
    shared: FactsPricer, layout: Layout, request: Request, *, source: str | None, inputs_source: str | None
) -> Plan:
    """The plan of `layout`, whether or not it fits. Raises UsageError when the model has no such layout."""
    num_units = len(shared.graph.units)
    if layout.pp > num_units:
        raise UsageError(f"pp {layout.pp} needs as many units; {shared.graph.name} has {num_units}")
    candidate = layout.candidate(shared, request)
    reason = exclusion(shared, candidate.setting.tp, candidate.setting.sequence)
    if reason is not None:
        raise UsageError(f"this model cannot be split so: {reason}{_without_sequence(shared, candidate)}")
    limits = Limits(zero=layout.zero, recompute=layout.recompute)
    priced = next(priced_tables(shared, candidate, request.budget_bytes, limits))
    solution = solve(replace(priced.table, usable_bytes=UNLIMITED_BYTES)).solution
    assert solution is not None, "without a memory limit every cut is feasible"
    return assemble(priced, solution, request, source=source, inputs_source=inputs_source, alternatives=(), search=None)


def _without_sequence(shared: FactsPricer, candidate: Candidate) -> str:
    """What to do about a layout that is impossible only because sequences are sharded; nothing to say otherwise."""
    setting = candidate.setting
    if setting.sequence == "none" or exclusion(shared, setting.tp, "none") is not None:
        return ""
    return f"; tp {setting.tp} works with whole sequences (--no-sequence-parallel, sequence='none')"
