"""The part of a unit's backward that makes weight gradients, which schedules with a split backward run later.

It is the matrix products whose results are parameters' gradients: what the runtime puts off
(`runtime.weight_gradients`). Gradients of norms, biases and embeddings come with those of the inputs. A unit that
recomputes makes all its gradients at once, as it would have to recompute twice otherwise.
"""

from __future__ import annotations

from galv.cost_models.compute import operator_seconds
from galv.planner.graph import Operator, UnitFacts
from galv.planner.plan import Recompute
from galv.profiles.device import DeviceProfile

_ITEM_BYTES = {"float32": 4, "float64": 8}


def put_off(facts: UnitFacts, recompute: Recompute) -> tuple[Operator, ...]:
    """The operators of backward that can run later."""
    return tuple(op for op in facts.operators if op.is_weight_gradient) if recompute == "none" else ()


def weight_seconds(facts: UnitFacts, recompute: Recompute, device: DeviceProfile) -> float:
    """Seconds of them for one microbatch. No more than the unit's backward takes."""
    return sum(operator_seconds(op, device) for op in put_off(facts, recompute))


def factor_bytes(facts: UnitFacts, recompute: Recompute) -> float:
    """What a unit keeps of one microbatch while they are to be run: the two factors of each product.

    One factor is what forward saved, which several products may share, so it is at most all that was saved; the other
    is the gradient of the result.
    """
    saved = made = 0.0
    for op in put_off(facts, recompute):
        assert op.matmul is not None
        _, rows, columns, inner = op.matmul
        item = _ITEM_BYTES.get(op.dtype, 2)
        saved += columns * inner * item
        made += rows * inner * item
    return min(saved, facts.saved_bytes + facts.input_bytes) + made
