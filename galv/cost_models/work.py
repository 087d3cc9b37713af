"""The work of one unit in a form that does not say which kernels run: products, attention, and memory traffic.

Eager PyTorch runs every captured operator as its own kernel. Other software has one kernel for a norm, for the rotation
of queries and keys, for a gated activation. Element-wise operators are told apart by where they stand between products
and attention, and each kind has two traffics: as captured, and as one kernel that reads and writes everything once. A
stack says which it runs. The same holds for what is kept for backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from galv.planner.graph import CollectiveKind, Operator, Phase, UnitFacts
from galv.planner.plan import OptimizerName, Precision, Recompute, SequenceMode, Strategy

NORM_SLOWNESS: dict[Phase, float] = {"forward": 1.5, "backward": 2.5}
"""Time of a norm's kernel over that of its traffic at the rate of other element-wise kernels: layer norms timed alone
on V100, A100, A10G and L4 (see the operators of the accuracy benchmark). Backward reduces over both sides."""


class Traffic(NamedTuple):
    """Bytes that one kind of element-wise operators reads and writes."""

    eager: float = 0.0
    """As captured, each operator a kernel."""
    fused: float = 0.0
    """As one kernel for each norm, rotation or activation."""

    def __add__(self, other: tuple[float, ...]) -> Traffic:  # type: ignore[override]
        """Both traffics added."""
        return Traffic(self.eager + other[0], self.fused + other[1])


@dataclass(frozen=True)
class Setting:
    """What all units share where another software trains."""

    tp: int
    sequence: SequenceMode
    dp: int
    pp: int
    num_microbatches: int
    microbatch: int
    """Samples of one data-parallel group."""
    precision: Precision
    optimizer: OptimizerName

    def strategy(self, zero: int, recompute: Recompute) -> Strategy:
        """The strategy of a unit in this setting."""
        shard = self.dp if zero else 1
        return Strategy(
            tp=self.tp,
            sequence=self.sequence,
            dp_shard=shard,
            dp_replicate=self.dp // shard,
            zero=zero,
            recompute=recompute,
        )


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """What one direction of a unit does for one microbatch on one rank. Bytes, counts."""

    is_forward: bool
    products: tuple[tuple[tuple[float, float, float, float], str, int], ...]
    """Each (batch, m, n, k), its dtype and how often it occurs."""
    attention: tuple[Operator, ...]
    norms: Traffic
    """Norms, and the residual sums beside them."""
    rotary: Traffic
    """What turns queries and keys."""
    activation: Traffic
    other_bytes: float
    """Element-wise operators of no kind: residual and gradient sums, biases, copies."""
    collectives: tuple[tuple[CollectiveKind, float], ...]


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What one unit does and keeps for one microbatch on one rank."""

    forward: PhaseWork
    backward: PhaseWork
    input_bytes: float
    output_bytes: float
    eager_saved_bytes: float
    """Kept for backward as captured, the unit's input included."""
    fused_saved_bytes: float
    """The same where only inputs of products, attention, activations and norms are kept."""
    gathered_bytes: float
    """Of those, what a tensor-parallel rank could gather again instead of keeping it."""
    attention_saved_bytes: float
    """Of those, the tensors of attention, which selective recompute of attention does not change."""


def unit_work(facts: UnitFacts) -> UnitWork:
    """The work behind `facts`."""
    forward = _phase(facts, "forward", _forward_traffic(facts))
    attention = sum(_attention_bytes(op) for op in forward.attention)
    eager = facts.saved_bytes + (facts.input_bytes if not facts.input_is_saved else 0.0)
    return UnitWork(
        forward=forward,
        backward=_phase(facts, "backward", _backward_traffic(facts)),
        input_bytes=facts.input_bytes,
        output_bytes=facts.output_bytes,
        eager_saved_bytes=max(eager + facts.input_bytes, 0.0),
        fused_saved_bytes=_fused_saved_bytes(facts, attention),
        gathered_bytes=_regatherable_bytes(facts),
        attention_saved_bytes=attention,
    )


def _phase(facts: UnitFacts, phase: Phase, kinds: dict[str, Traffic]) -> PhaseWork:
    operators = facts.phase(phase)
    products = Counter((op.matmul, op.dtype) for op in operators if op.kind == "matmul" and op.matmul is not None)
    known = sum(kind.eager for kind in kinds.values())
    return PhaseWork(
        is_forward=phase == "forward",
        products=tuple((shape, dtype, count) for (shape, dtype), count in products.items() if shape is not None),
        attention=tuple(op for op in operators if op.kind == "attention"),
        norms=kinds.get("norms", Traffic()),
        rotary=kinds.get("rotary", Traffic()),
        activation=kinds.get("activation", Traffic()),
        other_bytes=max(_moved(operators) - known, 0.0),
        collectives=tuple((op.collective, op.bytes_read) for op in operators if op.collective is not None),
    )


# ----------------------------------------------------------------------------------------------- kinds of operators


def _moved(operators: Iterable[Operator]) -> float:
    """Traffic of the element-wise operators among `operators`, more for slow kernels in proportion."""
    return sum(_slowness(op) * (op.bytes_read + op.bytes_written) for op in operators if op.kind == "memory")


def _slowness(op: Operator) -> float:
    return NORM_SLOWNESS[op.phase] if "_norm" in op.name else 1.0


def _segments(operators: Sequence[Operator]) -> list[list[Operator]]:
    """The element-wise operators before, between and after products and attention."""
    found: list[list[Operator]] = [[]]
    for op in operators:
        if op.kind in ("matmul", "attention"):
            found.append([])
        elif op.kind == "memory":
            found[-1].append(op)
    return found


def _places(operators: Sequence[Operator]) -> tuple[list[Operator], int] | None:
    """(products and attention in order, where attention stands among them); None without it and without enough."""
    heavy = [op for op in operators if op.kind in ("matmul", "attention")]
    position = _last_attention(heavy)
    return (heavy, position) if position > 0 and len(heavy) > position + 1 else None


def _forward_traffic(facts: UnitFacts) -> dict[str, Traffic]:
    operators = facts.phase("forward")
    places = _places(operators)
    if places is None:
        return {}
    (heavy, attention), segments = places, _segments(operators)
    norm, stream = 2 * NORM_SLOWNESS["forward"], facts.input_bytes
    norms = _kind(segments[0], norm * stream) + _kind(segments[attention + 2], (norm + 3) * stream)
    turned = [op for segment in segments[1 : attention + 1] for op in segment]
    acted = [op for segment in segments[attention + 3 : -1] for op in segment]
    return {
        "norms": norms,
        "rotary": _kind(turned, 2 * _queries_and_keys(heavy[attention])),
        "activation": _kind(acted, sum(_activation_bytes(facts))),
    }


def _backward_traffic(facts: UnitFacts) -> dict[str, Traffic]:
    """The same kinds in the other order: activation, norm, attention, rotation, norm."""
    operators = _without_bias_gradients(facts)
    places = _places(operators)
    if places is None or _places(facts.phase("forward")) is None:
        return {}
    (_, attention), segments = places, _segments(operators)
    projected = attention - 2  # what follows the products of the activation and precedes those of attention's output
    acted = [op for segment in segments[: max(projected, 0)] for op in segment]
    both = (3 * NORM_SLOWNESS["backward"] + 3) * facts.input_bytes
    norms = _kind(segments[-1], both) + _kind(segments[max(projected, 0)], both)
    given, made = _activation_bytes(facts)
    rotated = _forward_traffic(facts)["rotary"].fused
    turned = segments[attention + 1] if rotated else []
    return {"norms": norms, "rotary": _kind(turned, rotated), "activation": _kind(acted, 2 * given + made)}


def _without_bias_gradients(facts: UnitFacts) -> list[Operator]:
    """The operators of backward without the sums of products' biases, which are of no kind."""
    biased = any(op.name.startswith("aten.addmm") for op in facts.phase("forward"))
    return [op for op in facts.phase("backward") if not (biased and op.name.startswith("aten.sum"))]


def _kind(operators: Sequence[Operator], fused: float) -> Traffic:
    eager = _moved(operators)
    return Traffic(eager, min(fused, eager))


def _queries_and_keys(attention: Operator) -> float:
    """Bytes of the queries and keys of an attention kernel."""
    assert attention.attention is not None
    batch, heads, query, _, dim, _ = attention.attention
    queries = batch * heads * query * dim * _item_bytes(attention)
    return queries + max(attention.bytes_read - queries, 0.0) / 2


def _activation_bytes(facts: UnitFacts) -> tuple[float, float]:
    """Bytes that the activation function is given by products, and that it makes for the last product."""
    heavy = [op for op in facts.phase("forward") if op.kind in ("matmul", "attention")]
    after = [op for op in heavy[_last_attention(heavy) + 1 :] if op.matmul is not None]
    if len(after) < 2:
        return 0.0, 0.0
    assert after[-1].matmul is not None
    batch, m, _, k = after[-1].matmul
    return sum(op.bytes_written for op in after[1:-1]), batch * m * k * _item_bytes(after[-1])


# ----------------------------------------------------------------------------------------------- what is kept


def _products(facts: UnitFacts) -> list[Operator]:
    return [op for op in facts.phase("forward") if op.kind == "matmul" and op.matmul is not None]


def _distinct_inputs(facts: UnitFacts) -> list[float]:
    """Bytes of the first operands of forward products; neighbours of one shape (q, k, v) share one."""
    found: list[tuple[object, float]] = []
    for op in _products(facts):
        assert op.matmul is not None
        batch, m, _, k = op.matmul
        if not found or found[-1][0] != (batch, m, k):
            found.append(((batch, m, k), batch * m * k * _item_bytes(op)))
    return [size for _, size in found]


def _item_bytes(op: Operator) -> int:
    return 4 if op.dtype.endswith("32") else 2


def _attention_bytes(op: Operator) -> float:
    """Query, key, value and output of a fused attention kernel."""
    return op.bytes_read + op.bytes_written


def _fused_saved_bytes(facts: UnitFacts, attention: float) -> float:
    """Inputs of products and of attention, of the activation function, and of two norms.

    The output of attention is the input of the product after it and counts once. What feeds the activation function
    are the outputs of the products between attention's own and the last one.
    """
    inputs = sum(_distinct_inputs(facts))
    products = _products(facts)
    position = [op for op in facts.phase("forward") if op.kind in ("matmul", "attention")]
    after = [op for op in position[_last_attention(position) + 1 :] if op in products]
    activation = _activation_bytes(facts)[0] if attention else 0.0
    shared = after[0].matmul if attention and after else None
    projected = shared[0] * shared[1] * shared[3] * _item_bytes(after[0]) if shared else 0.0
    return inputs + attention - projected + activation + 2 * facts.input_bytes


def _last_attention(operators: list[Operator]) -> int:
    return max((i for i, op in enumerate(operators) if op.kind == "attention"), default=-1)


def _regatherable_bytes(facts: UnitFacts) -> float:
    """What all-gathers of forward add to their inputs."""
    gathers = [op for op in facts.phase("forward") if op.collective == "all_gather"]
    return sum(max(op.bytes_read - facts.input_bytes, 0.0) for op in gathers)
