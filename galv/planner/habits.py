"""The layouts that people choose by habit, each at its best, to hold a plan against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from galv.cost_models.unit import Degrees, FactsPricer
from galv.errors import GalvError, NoFeasiblePlan
from galv.planner.plan import Alternative
from galv.planner.plan_table import gib
from galv.planner.planner import best_plan
from galv.planner.space import Candidate, Features, Request, candidates, describe, exclusion
from galv.planner.tables import Limits


def alternatives(shared: FactsPricer, request: Request) -> tuple[Alternative, ...]:
    """Plain DDP, FSDP everywhere, Megatron-style tensor parallelism within the node, and a plain pipeline.

    All units have the same degrees. Microbatch and recomputation are tuned for each, as a careful user would.
    """
    node, budget_bytes = shared.cluster.devices_per_node, request.budget_bytes
    found = candidates(shared.graph, shared.cluster, request, Features())

    def only_data(candidate: Candidate) -> bool:
        return candidate.outer.pp == _tp(candidate) == 1

    def megatron(candidate: Candidate) -> bool:
        return candidate.outer.pp == 1 and _tp(candidate) == node > 1

    def pipeline(candidate: Candidate) -> bool:
        return candidate.outer.pp > 1 and _tp(candidate) == 1

    rows: list[tuple[str, Callable[[Candidate], bool], int]] = [
        ("DDP", only_data, 0),
        ("FSDP", only_data, 3),
        (f"TP {node} in the node", megatron, 1),
        ("PP", pipeline, 0),
    ]
    return tuple(_alternative(shared, name, filter(keep, found), budget_bytes, zero) for name, keep, zero in rows)


def _tp(candidate: Candidate) -> int:
    assert candidate.uniform is not None, "habits do not mix degrees"
    return candidate.uniform.tp


def _alternative(
    shared: FactsPricer, name: str, found: Sequence[Candidate] | filter[Candidate], budget_bytes: int, zero: int
) -> Alternative:
    kept = list(found)
    if not kept:
        return Alternative(name=name, layout="", step_seconds=None, reason=_absence(shared, name))
    try:
        answer = best_plan(shared, kept, budget_bytes, limits=Limits(zero=zero))
    except NoFeasiblePlan as error:
        needed = "" if error.smallest_budget_bytes is None else f": needs {gib(error.smallest_budget_bytes)} GiB"
        reason = f"does not fit{needed} of {gib(budget_bytes)}"
        return Alternative(name=name, layout=f"zero {zero}", step_seconds=None, reason=reason)
    except GalvError as error:
        return Alternative(name=name, layout="", step_seconds=None, reason=str(error))
    levels = [choice.strategy.zero for _, picks in answer.solution.stages[0].picks for choice, _ in picks]
    layout = f"{describe(answer.priced.candidate)}, zero {max(levels)}"
    return Alternative(name=name, layout=layout, step_seconds=answer.solution.step_seconds, reason="")


def _absence(shared: FactsPricer, name: str) -> str:
    node = shared.cluster.devices_per_node
    if name.startswith("TP") and node > 1:
        return exclusion(shared, Degrees(node)) or "the global batch does not divide among its data-parallel groups"
    if name.startswith("TP"):
        return "one device a node"
    if name == "PP":
        return "no pipeline degree suits the devices, the units and the global batch"
    return f"the global batch does not divide among {shared.cluster.num_devices} data-parallel groups"
