"""The work of one unit in a form that does not say which kernels run: products, attention, and two memory traffics.

Eager PyTorch runs every captured operator as its own kernel. A software that fuses runs fewer: at best each chain of
element-wise operators reads what products left and writes what the next products need, once. Both traffics come from
the captured operators; a stack says where between them it lies. The same holds for what is kept for backward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from galv.planner.graph import CollectiveKind, Operator, Phase, UnitFacts
from galv.planner.plan import OptimizerName, Precision, Recompute, SequenceMode, Strategy

BACKWARD_TRAFFIC = 1.7
"""Fused element-wise traffic of backward over that of forward: a backward chain reads the gradient and a saved tensor
where forward reads one tensor, and writes one."""


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

    products: tuple[tuple[tuple[float, float, float, float], str, int], ...]
    """Each (batch, m, n, k), its dtype and how often it occurs."""
    attention: tuple[Operator, ...]
    eager_bytes: float
    """Traffic of the element-wise operators as captured."""
    fused_bytes: float
    """Traffic of the same work as perfectly fused chains."""
    num_operators: int
    """Operators that the host issues, views left out."""
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
    forward = _phase(facts, "forward", _fused_forward_bytes(facts))
    backward = _phase(facts, "backward", BACKWARD_TRAFFIC * forward.fused_bytes)
    attention = sum(_attention_bytes(op) for op in forward.attention)
    eager = facts.saved_bytes + (facts.input_bytes if not facts.input_is_saved else 0.0)
    return UnitWork(
        forward=forward,
        backward=backward,
        input_bytes=facts.input_bytes,
        output_bytes=facts.output_bytes,
        eager_saved_bytes=max(eager + facts.input_bytes, 0.0),
        fused_saved_bytes=_fused_saved_bytes(facts, attention),
        gathered_bytes=_regatherable_bytes(facts),
        attention_saved_bytes=attention,
    )


def _phase(facts: UnitFacts, phase: Phase, fused_bytes: float) -> PhaseWork:
    operators = facts.phase(phase)
    products = Counter((op.matmul, op.dtype) for op in operators if op.kind == "matmul" and op.matmul is not None)
    eager = sum(op.bytes_read + op.bytes_written for op in operators if op.kind == "memory")
    return PhaseWork(
        products=tuple((shape, dtype, count) for (shape, dtype), count in products.items() if shape is not None),
        attention=tuple(op for op in operators if op.kind == "attention"),
        eager_bytes=eager,
        fused_bytes=min(fused_bytes, eager),
        num_operators=sum(op.kind != "view" and op.collective is None for op in operators),
        collectives=tuple((op.collective, op.bytes_read) for op in operators if op.collective is not None),
    )


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


def _outputs(facts: UnitFacts) -> list[float]:
    return [op.bytes_written for op in _products(facts)]


def _item_bytes(op: Operator) -> int:
    return 4 if op.dtype.endswith("32") else 2


def _attention_bytes(op: Operator) -> float:
    """Query, key, value and output of a fused attention kernel."""
    return op.bytes_read + op.bytes_written


def _fused_forward_bytes(facts: UnitFacts) -> float:
    """Each product's input written and output read once, and the residual stream read and written once."""
    attention = sum(_attention_bytes(op) for op in facts.phase("forward") if op.kind == "attention")
    return sum(_distinct_inputs(facts)) + sum(_outputs(facts)) + attention + 2 * facts.input_bytes


def _fused_saved_bytes(facts: UnitFacts, attention: float) -> float:
    """Inputs of products and of attention, of the activation function, and of two norms.

    The output of attention is the input of the product after it and counts once. What feeds the activation function
    are the outputs of the products between attention's own and the last one.
    """
    inputs = sum(_distinct_inputs(facts))
    products = _products(facts)
    position = [op for op in facts.phase("forward") if op.kind in ("matmul", "attention")]
    after = [op for op in position[_last_attention(position) + 1 :] if op in products]
    activation = sum(op.bytes_written for op in after[1:-1]) if attention else 0.0
    shared = after[0].matmul if attention and after else None
    projected = shared[0] * shared[1] * shared[3] * _item_bytes(after[0]) if shared else 0.0
    return inputs + attention - projected + activation + 2 * facts.input_bytes


def _last_attention(operators: list[Operator]) -> int:
    return max((i for i, op in enumerate(operators) if op.kind == "attention"), default=-1)


def _regatherable_bytes(facts: UnitFacts) -> float:
    """What all-gathers of forward add to their inputs."""
    gathers = [op for op in facts.phase("forward") if op.collective == "all_gather"]
    return sum(max(op.bytes_read - facts.input_bytes, 0.0) for op in gathers)
