"""What the units of a model cost when another software than galv's runtime trains it.

The same operator graph, devices and collectives as everywhere; a `StackProfile` says which kernels are fused, how long
the host needs, when gradients travel and what is kept. Costs come out as `UnitCost`, so that pipelines, memory and
estimates are computed alike for all software.

Blocks are priced as captured under their tensor-parallel layout. What stands around them is priced as Megatron-LM
(Shoeybi et al. 2019; Korthikanti et al. 2022) divides it: the embedding's rows and the output layer's columns over the
tensor axis, the loss on local logits, one exchange of activations at each end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from galv.cost_models.communication import Group, collective_seconds, mesh_group, p2p_seconds
from galv.cost_models.compute import attention_seconds, clip_seconds, matmul_seconds
from galv.cost_models.memory import ModelStates
from galv.cost_models.overlap import exposed_seconds, resource_of
from galv.cost_models.unit import UnitCost
from galv.cost_models.work import PhaseWork, Setting, UnitWork, unit_work
from galv.planner.graph import CollectiveKind, Exclusion, ModelGraph, Operator, Phase, UnitFacts
from galv.planner.plan import (
    ContextMode,
    ExpertLayout,
    Recompute,
    SequenceLayout,
    SequenceMode,
    Strategy,
    TensorParallelLayout,
)
from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile, short_dtype
from galv.profiles.stack import StackProfile

SMOOTH = 6
"""Host and device take turns being late within a block: (device^6 + host^6)^(1/6) rather than the larger of the two."""
FP32_NORMS: dict[Phase, float] = {"forward": 2.5, "backward": 2.3}
"""Time of norms and residual sums in fp32 over that in half precision, for one kernel each: forward a norm moves 4 + 4
bytes an element and 2 + 4 for a copy to half precision instead of 2 + 2, a sum 2 + 4 + 4 instead of 6; backward 6 for
the copy of the gradient, 12 for the norm and 12 for the sum instead of 6 and 6; norms slow as in `NORM_SLOWNESS`."""
LEAST_EXPOSED = 0.05
"""Of gradient reduction, the last bucket that no computation can hide."""


def smooth_max(a: float, b: float) -> float:
    """A little more than the larger of two times where they are close; the larger where they are not."""
    largest = max(a, b)
    if largest <= 0:
        return 0.0
    ratio: float = ((a / largest) ** SMOOTH + (b / largest) ** SMOOTH) ** (1 / SMOOTH)
    return largest * ratio


@dataclass(frozen=True)
class _KnownFacts:
    """A `FactsSource` of one sample without tensor parallelism."""

    known: dict[str, UnitFacts]

    def facts(
        self,
        unit_class: str,
        layout: TensorParallelLayout | None,
        microbatch: int,
        *,
        sequence: SequenceLayout | None = None,
        ep: int = 1,
    ) -> UnitFacts:
        """The facts of one sample."""
        assert (layout, microbatch, sequence, ep) == (None, 1, None, 1)
        return self.known[unit_class]

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        """None is known."""
        return Exclusion(f"{unit_class} was not captured at tp {degree} {sequence}")

    def sequence_layout(
        self, unit_class: str, mode: ContextMode, degree: int, *, tp: int = 1
    ) -> SequenceLayout | Exclusion:
        """None is known."""
        return Exclusion(f"{unit_class} was not captured at cp {degree} {mode} tp {tp}")

    def expert_exclusion(self, unit_class: str, degree: int, *, tp: int = 1) -> Exclusion | None:
        """None is known."""
        return Exclusion(f"{unit_class} was not captured at ep {degree} tp {tp}")

    def expert_layout(self, unit_class: str) -> ExpertLayout | Exclusion:
        """None is known."""
        return Exclusion(f"{unit_class} was not captured with experts")


class WorkLibrary:
    """The work of each (unit class, tensor degree, sequence mode, microbatch) of one model, whoever asks."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self._layouts: dict[tuple[str, int, str], TensorParallelLayout | Exclusion | None] = {}
        self._works: dict[tuple[str, int, str, int], UnitWork] = {}
        self._sharded: dict[tuple[str, int, str], float] = {}

    def frozen(self) -> WorkLibrary:
        """The same with only what was asked so far, without the traced model: small, and can be pickled."""
        facts = {name: self.graph.source.facts(name, None, 1) for name in self.graph.classes}
        copy = WorkLibrary(replace(self.graph, source=_KnownFacts(facts)))
        copy._layouts = {k: v if isinstance(v, Exclusion) else None for k, v in self._layouts.items()}
        copy._works, copy._sharded = dict(self._works), dict(self._sharded)
        return copy

    def layout(self, unit_class: str, setting: Setting) -> TensorParallelLayout | Exclusion | None:
        """The placements of a unit class in a setting; None without tensor parallelism."""
        key = (unit_class, setting.tp, setting.sequence)
        if key not in self._layouts:
            found = None if setting.tp == 1 else self.graph.source.layout(*key)
            self._layouts[key] = found
        return self._layouts[key]

    def work(self, unit_class: str, setting: Setting, *, whole: bool) -> UnitWork:
        """The work of a unit class in a setting; `whole` as if there were no tensor axis."""
        tp, sequence = (1, "none") if whole else (setting.tp, setting.sequence)
        key = (unit_class, tp, sequence, setting.microbatch)
        if key not in self._works:
            layout = None if whole else self.layout(unit_class, setting)
            assert not isinstance(layout, Exclusion), layout
            self._works[key] = unit_work(self.graph.source.facts(unit_class, layout, setting.microbatch))
        return self._works[key]

    def sharded_parameters(self, unit_class: str, setting: Setting) -> float:
        """Parameters of a block on one rank of the tensor axis."""
        key = (unit_class, setting.tp, setting.sequence)
        if key not in self._sharded:
            self._sharded[key] = self._local(unit_class, self.layout(unit_class, setting), setting.tp)
        return self._sharded[key]

    def _local(self, unit_class: str, layout: TensorParallelLayout | Exclusion | None, degree: int) -> float:
        assert not isinstance(layout, Exclusion), layout
        modules = layout.modules if layout else ()
        cut = {
            ".".join(part for part in (module.module, name) if part)
            for module in modules
            for name, change in module.parameters.items()
            if change.source.kind == "S"
        }
        parameters = self.graph.classes[unit_class].parameters
        return sum(p.numel / (degree if p.name in cut else 1) for p in parameters)


@dataclass(frozen=True)
class StackPricer:
    """Prices the units of one model on one cluster in one setting, as one stack runs them."""

    library: WorkLibrary
    cluster: ClusterProfile
    """With the network as the stack reaches it, see `reached_cluster`."""
    stack: StackProfile
    setting: Setting
    zero: int
    recompute: Recompute
    fused_attention: bool = True
    context: int = 1
    """Context-parallel degree: the sequence is cut into so many parts."""

    @cached_property
    def _strategy(self) -> Strategy:
        return self.setting.strategy(self.zero, self.recompute).model_copy(update={"cp": self.context})

    @property
    def device(self) -> DeviceProfile:
        return self.cluster.device

    @property
    def graph(self) -> ModelGraph:
        return self.library.graph

    @cached_property
    def tensor_group(self) -> Group:
        return mesh_group(self.cluster, stride=1, size=self.setting.tp)

    @cached_property
    def data_group(self) -> Group:
        """Sequence parts see different tokens, so gradients are reduced over them as well."""
        return mesh_group(self.cluster, stride=self.setting.tp, size=self.setting.dp * self.context)

    def transfer_seconds(self) -> float:
        """Seconds to send one microbatch's activation to the next stage."""
        if self.setting.pp == 1:
            return 0.0
        sizes = (self.library.work(name, self.setting, whole=False).output_bytes for name in self._block_classes)
        stride = self.cluster.num_devices // self.setting.pp
        return p2p_seconds(max(sizes) / self.context, stride, self.cluster)

    @cached_property
    def _block_classes(self) -> list[str]:
        return list(dict.fromkeys(unit.unit_class for unit in self.graph.units if _is_block(unit.name)))

    # -- units

    def block(self, unit_class: str) -> UnitCost:
        """The cost of one repeated block."""
        work = self.library.work(unit_class, self.setting, whole=False)
        parameters = self.library.sharded_parameters(unit_class, self.setting)
        phases = work.forward, work.backward
        forward, backward = (self._phase_seconds(phase) for phase in phases)
        sent = [self._tensor_seconds(*one) for one in zip(phases, (forward, backward), strict=True)]
        waits = self._stall_seconds()
        forward = smooth_max(forward + sent[0], self._host_seconds(work.forward) + waits / 3) - sent[0]
        again = self._again_seconds(work, forward, sent[0])
        backward = smooth_max(backward + sent[1], self._host_seconds(work.backward) + waits * 2 / 3) - sent[1]
        cost = (forward, backward + again, sent[0], sent[1])
        return self._unit(parameters, *cost, self._block_bytes(work), self._block_working_bytes(work))

    def embedding(self, unit_class: str) -> UnitCost:
        """The cost of what stands before the blocks: a lookup, and the exchange of what each rank looked up."""
        parameters = self.graph.classes[unit_class].num_parameters / self.setting.tp
        traffic = 3 * self._hidden_bytes / self.device.achieved_bytes_per_second
        sent = self._exchange_seconds()
        kept = 0.0 if self.setting.sequence == "none" else self._hidden_bytes / self.setting.tp
        return self._unit(parameters, traffic, 2 * traffic, sent[0], sent[1], kept, 0.0)

    def head(self, unit_class: str, *, tied_copy: bool) -> UnitCost:
        """The cost of what stands after the blocks; `tied_copy` leaves out the table that the embedding holds."""
        work = self.library.work(unit_class, self.setting, whole=True)
        tp = self.setting.tp
        vocabulary = _vocabulary(self.graph, unit_class)
        products = [_divided(phase, vocabulary, tp) for phase in (work.forward, work.backward)]
        forward, backward = (self._products_seconds(phase) for phase in products)
        logits = sum(b * m * n * count for (b, m, n, _), _, count in work.forward.products) / self.context
        local = logits / tp if self.stack.logits == "sharded" else logits
        loss = local * self.stack.loss_bytes_per_logit / self.device.achieved_bytes_per_second
        sent = self._exchange_seconds()
        gather = 0.0
        if self.stack.logits == "gathered":
            gather = collective_seconds("all_gather", 2 * logits, self.tensor_group, self.cluster)
        return self._unit(
            0.0 if tied_copy else self.graph.classes[unit_class].num_parameters / tp,
            forward + loss / 3,
            backward + loss * 2 / 3,
            sent[1] + gather,
            sent[0],
            self._hidden_bytes,
            local * self.stack.logit_bytes + self._beside_logits_bytes(),
        )

    def _beside_logits_bytes(self) -> float:
        """What the last block builds while the logits are still there."""
        if not self.stack.holds_logits:
            return 0.0
        return self._block_working_bytes(self.library.work(self._block_classes[-1], self.setting, whole=False))

    def _unit(
        self,
        parameters: float,
        forward: float,
        backward: float,
        forward_sent: float,
        backward_sent: float,
        kept: float,
        working: float,
    ) -> UnitCost:
        data = self._data_seconds(parameters, forward + forward_sent, backward + backward_sent)
        owned = parameters / (self._shards if self.zero else 1)
        update = owned * self.stack.update_bytes / self.device.achieved_bytes_per_second
        return UnitCost(
            strategy=self._strategy,
            forward_compute_seconds=forward,
            forward_exposed_seconds=forward_sent + data[0],
            backward_compute_seconds=backward,
            backward_exposed_seconds=backward_sent + data[1],
            step_exposed_seconds=data[2],
            optimizer_seconds=update + clip_seconds(owned, self.device),
            states=self._states(parameters),
            activation_bytes=kept / self.context,
            working_bytes=working + self._gathered_bytes(parameters) + self.stack.overhead_bytes,
        )

    # -- computation

    def _phase_seconds(self, phase: PhaseWork) -> float:
        """Device seconds of one direction of a block, collectives apart."""
        attention = sum(self._attention_seconds(op) for op in phase.attention)
        traffic = self.stack.elementwise_factor * self._traffic(phase) / self.context
        return self._products_seconds(phase) + attention + traffic / self.device.achieved_bytes_per_second

    def _traffic(self, phase: PhaseWork) -> float:
        """Bytes that the element-wise kernels of the stack read and write."""
        stack = self.stack
        norms = {
            "eager": phase.norms.eager,
            "fp32": phase.norms.fused * FP32_NORMS["forward" if phase.is_forward else "backward"],
            "fused": phase.norms.fused,
        }
        kinds = ((stack.rotary, phase.rotary), (stack.activation, phase.activation))
        others = sum(kind.eager if kernels == "eager" else kind.fused for kernels, kind in kinds)
        return norms[stack.norms] + others + phase.other_bytes

    def _products_seconds(self, phase: PhaseWork) -> float:
        return sum(count * self._product(shape, dtype) for shape, dtype, count in phase.products)

    def _product(self, shape: tuple[float, float, float, float], dtype: str) -> float:
        batch, m, n, k = shape
        tokens = 1 / self.context
        arithmetic = tokens * matmul_seconds(batch, m, n, k, short_dtype(dtype), self.device) / self.stack.product_share
        moved = 2.0 * batch * (m * k + k * n + m * n) * tokens
        return self.device.kernel_seconds + max(arithmetic, moved / self.device.achieved_bytes_per_second)

    def _attention_seconds(self, op: Operator) -> float:
        """Fused: by the device's kernel. Unfused: two products without causal savings, and passes over the scores."""
        assert op.attention is not None
        if self.fused_attention:
            return attention_seconds(op, self.device) / (self.stack.flash_share * self.context)
        batch, heads, query, key, dim, _ = op.attention
        dtype = short_dtype(op.dtype)
        products = matmul_seconds(batch * heads, query, key, dim, dtype, self.device)
        products += matmul_seconds(batch * heads, query, dim, key, dtype, self.device)
        scores = 2.0 * batch * heads * query * key * self.stack.score_passes
        share = 0.4 if op.phase == "forward" else 0.6
        times = 1 if op.phase == "forward" else 2
        return (products * times + share * scores / self.device.achieved_bytes_per_second) / self.context

    def _host_seconds(self, phase: PhaseWork) -> float:
        per = (self.stack.host_seconds_per_block, self.stack.host_seconds_per_collective)
        return per[0] * (1 if phase.is_forward else 2) / 3 + len(phase.collectives) * per[1]

    def _stall_seconds(self) -> float:
        pipelined = self.setting.pp > 1 and self.setting.tp > 1 and self.cluster.num_nodes > 1
        return self.stack.stall_seconds * self.setting.tp / 8 if pipelined else 0.0

    def _again_seconds(self, work: UnitWork, forward: float, sent: float) -> float:
        """What recomputation adds to a backward pass."""
        if self.recompute == "full":
            return forward + sent
        if self.recompute == "selective":
            return sum(self._attention_seconds(op) for op in work.forward.attention)
        return 0.0

    # -- the tensor axis

    @property
    def _hidden_bytes(self) -> float:
        """One microbatch's activation between blocks, whole."""
        work = self.library.work(self._block_classes[0], self.setting, whole=True)
        return work.input_bytes

    def _tensor_seconds(self, phase: PhaseWork, compute: float) -> float:
        """Seconds of the tensor axis' collectives in one direction that `compute`, a block's own, does not hide."""
        whole = [
            (kind, collective_seconds(kind, size / self.context, self.tensor_group, self.cluster))
            for kind, size in phase.collectives
        ]
        gathers = sum(seconds for kind, seconds in whole if kind == "all_gather")
        others = sum(seconds for kind, seconds in whole if kind != "all_gather")
        return others + max(gathers - self.stack.gather_overlap * compute, 0.0)

    def _exchange_seconds(self) -> tuple[float, float]:
        """One end of the blocks: (joining what each rank has, giving each rank its part)."""
        if self.setting.tp == 1:
            return 0.0, 0.0
        size = self._hidden_bytes / self.context
        if self.setting.sequence == "none":
            return collective_seconds("all_reduce", size, self.tensor_group, self.cluster), 0.0
        joins = collective_seconds("reduce_scatter", size, self.tensor_group, self.cluster)
        return joins, collective_seconds("all_gather", size, self.tensor_group, self.cluster)

    # -- the data axis

    @property
    def _shards(self) -> int:
        return self.setting.dp * self.context

    def _data_seconds(self, parameters: float, forward: float, backward: float) -> tuple[float, float, float]:
        """Exposed seconds: each microbatch forward and backward, and once a step."""
        if self._shards == 1 or not parameters:
            return 0.0, 0.0, 0.0
        gather = self._bucketed("all_gather", parameters * self.stack.parameter_bytes)
        scatter = self._bucketed("reduce_scatter", parameters * self.stack.reduce_bytes)
        if self.zero == 3:
            gather = self._over_data("all_gather", parameters * self.stack.parameter_bytes)
            scatter = self._over_data("reduce_scatter", parameters * self.stack.reduce_bytes)
            return self._hidden(forward, gather), self._hidden(backward, gather + scatter), 0.0
        if self.zero == 0:
            size = self.stack.all_reduce_bytes or self.stack.reduce_bytes
            scatter, gather = self._bucketed("all_reduce", parameters * size), 0.0
        return 0.0, 0.0, max(self._hidden(backward, scatter), LEAST_EXPOSED * scatter) + gather

    def _hidden(self, compute: float, communication: float) -> float:
        """What `communication` adds to `compute`, of which a share can hide it."""
        open_to = self.stack.gradient_overlap * compute
        slowdown = self.device.overlap.between("compute", resource_of(self.data_group))
        return exposed_seconds(open_to, communication, slowdown)

    def _bucketed(self, kind: CollectiveKind, num_bytes: float) -> float:
        """Seconds of one unit's bytes, in calls of the bucket's size."""
        bucket = self.stack.bucket_bytes
        return num_bytes / bucket * self._over_data(kind, bucket)

    def _over_data(self, kind: CollectiveKind, num_bytes: float) -> float:
        return collective_seconds(kind, num_bytes, self.data_group, self.cluster)

    def tied_seconds(self, parameters: float) -> float:
        """Seconds to add the gradients of a table that the first and the last stage both hold."""
        ends = mesh_group(
            self.cluster, stride=self.cluster.num_devices * (self.setting.pp - 1) // self.setting.pp, size=2
        )
        return collective_seconds("all_reduce", parameters * self.stack.reduce_bytes, ends, self.cluster)

    # -- memory

    def _states(self, parameters: float) -> ModelStates:
        shards, stack = self._shards, self.stack
        return ModelStates(
            parameters_bytes=round(parameters * stack.parameter_bytes / (shards if self.zero == 3 else 1)),
            gradients_bytes=round(parameters * stack.gradient_bytes / (shards if self.zero >= 2 else 1)),
            optimizer_bytes=round(parameters * stack.optimizer_bytes / (shards if self.zero >= 1 else 1)),
        )

    def _gathered_bytes(self, parameters: float) -> float:
        """ZeRO 3: this unit's parameters and fresh gradients, and the next unit's parameters where they come early."""
        if self.zero != 3 or self._shards == 1:
            return 0.0
        copies = 2 if self.stack.prefetches else 1
        return parameters * (copies * self.stack.parameter_bytes + self.stack.gradient_bytes)

    def _block_bytes(self, work: UnitWork) -> float:
        """Kept by one block for one microbatch."""
        if self.recompute == "full":
            return work.input_bytes
        return self._unrecomputed_bytes(work)

    def _unrecomputed_bytes(self, work: UnitWork) -> float:
        fused = work.fused_saved_bytes - (0.0 if self.stack.keeps_gathered else work.gathered_bytes)
        extra = self.stack.saved_share * max(work.eager_saved_bytes - work.fused_saved_bytes, 0.0)
        scores = 0.0 if self.recompute == "selective" else self._num_scores(work) * self.stack.score_bytes
        return max(fused, 0.0) + extra + scores

    def _num_scores(self, work: UnitWork) -> float:
        """Scores that unfused attention makes of one microbatch in one block."""
        if self.fused_attention:
            return 0.0
        return sum(_num_scores(op.attention) for op in work.forward.attention if op.attention is not None)

    def _block_working_bytes(self, work: UnitWork) -> float:
        """Alive while one block runs: what full recomputation builds again, and scores in the making."""
        again = self._unrecomputed_bytes(work) if self.recompute == "full" else 0.0
        if self.recompute == "selective":
            again = self._num_scores(work) * self.stack.score_bytes
        return (again + self._num_scores(work) * self.stack.score_working_bytes) / self.context


def _num_scores(shape: tuple[float, float, float, float, float, bool]) -> float:
    batch, heads, query, key, _, _ = shape
    return batch * heads * query * key


def _vocabulary(graph: ModelGraph, unit_class: str) -> int:
    """The rows of the output layer's table: the longest first side of a matrix among the head's parameters."""
    return max((p.shape[0] for p in graph.classes[unit_class].parameters if len(p.shape) == 2), default=1)


def _divided(phase: PhaseWork, vocabulary: int, share: int) -> PhaseWork:
    """The products of an output layer whose vocabulary is divided by `share`."""
    if share == 1:
        return phase
    products = tuple(
        ((b, *_cut_one((m, n, k), vocabulary, share)), dtype, count) for (b, m, n, k), dtype, count in phase.products
    )
    return replace(phase, products=products)


def _cut_one(sides: tuple[float, float, float], length: float, share: int) -> tuple[float, float, float]:
    """`sides` with the last one that has `length` divided."""
    position = max((i for i, side in enumerate(sides) if side == length), default=None)
    m, n, k = (side / share if i == position else side for i, side in enumerate(sides))
    return m, n, k


def _is_block(name: str) -> bool:
    return name not in ("embedding", "head")


def reached_cluster(cluster: ClusterProfile, stack: StackProfile) -> ClusterProfile:
    """`cluster` with its network as `stack` reaches it."""
    link = cluster.inter_node
    figures = {
        "efficiency": min(1.0, link.efficiency * stack.network_share),
        "gather_efficiency": min(1.0, link.gather_efficiency * stack.network_share),
        "latency_seconds": link.latency_seconds + stack.network_hop_seconds,
        "node_decay": max(link.node_decay, stack.node_decay),
    }
    return cluster.model_copy(update={"inter_node": link.model_copy(update=figures)})
