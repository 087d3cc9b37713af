"""Why a unit of a plan has its strategy: the plan's prices are found anew, and one unit's choice is held against the
next best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from galv.cost_models.unit import Degrees, FactsPricer
from galv.errors import ModelError, UsageError
from galv.planner.constraints import Constraints, read_constraints
from galv.planner.plan import Plan, Strategy, Unit
from galv.planner.plan_table import gib, seconds, size
from galv.planner.search.assign import stage_choice
from galv.planner.search.explain import Explanation, explain
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Solution
from galv.planner.search.table import CostTable, Option
from galv.planner.space import RUNS, Candidate, Features, Request, outer_of
from galv.planner.tables import Limits, PricedTable, priced_tables


@dataclass(frozen=True)
class Why:
    """Why one unit of a plan has its strategy. `str` says it in words."""

    unit: str
    rank: int
    """The pipeline rank that holds it."""
    strategy: Strategy
    binds: str
    """What decides: `memory`, `compute` or `communication` of the unit's stage."""
    runner_up: Strategy | None
    """The next best for this unit alone; None where no other fits."""
    step_seconds: float
    """What one unit more of it adds to a step, the stage's other units chosen anew."""
    stage_seconds: float
    """What it adds to the stage's own busy seconds."""
    held_bytes: float
    """What it adds to the bytes that the unit holds."""
    fastest: Strategy
    """What the unit would have if memory were free."""
    fastest_held_bytes: float
    """What it would hold then beyond what it holds now."""
    seconds_per_gib: float
    """What one GiB more per device would save of the stage's seconds, as far as one unit's change goes."""
    peak_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        peak = f"stage {self.rank} holds {gib(self.peak_bytes)} of {gib(self.budget_bytes)} GiB"
        return "\n".join([f"{self.unit} (stage {self.rank}): {self.strategy}", self._binding(peak), *self._switch()])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        shown = {name: value for name, value in asdict(self).items() if not isinstance(value, Strategy)}
        strategies = {"strategy": self.strategy, "runner_up": self.runner_up, "fastest": self.fastest}
        return shown | {name: None if one is None else one.model_dump() for name, one in strategies.items()}

    def _binding(self, peak: str) -> str:
        if self.binds == "memory":
            worth = f"; a GiB more would save {seconds(self.seconds_per_gib)}" if self.seconds_per_gib > 0 else ""
            spare = f"with {size(self.fastest_held_bytes)} to spare it would be {self.fastest}"
            return f"memory binds: {peak}{worth}; {spare}"
        return f"{self.binds} binds: nothing is faster for this unit, whatever its memory; {peak}"

    def _switch(self) -> Iterator[str]:
        if self.runner_up is None:
            yield "not one unit more of any other strategy fits"
            return
        more = "more" if self.held_bytes >= 0 else "less"
        step = f"{seconds(self.step_seconds)} a step" if self.step_seconds > 0 else "nothing a step"
        yield f"runner-up: {self.runner_up}"
        yield f"one unit more of that costs {step} and the unit holds {size(abs(self.held_bytes))} {more}"
        if self.stage_seconds > self.step_seconds * (1 + 1e-6) + 1e-9:
            yield f"its stage would be busy for {seconds(self.stage_seconds)} more, part of which hides in waiting"


def why(plan: Plan, shared: FactsPricer, unit: str) -> Why:
    """Why `unit` of `plan` has its strategy, by the prices of `shared`: the plan's model on its cluster.

    The space is that of the search, under the plan's demands. Raises UsageError for a unit that the plan has not.
    """
    if plan.model.fingerprint != shared.graph.fingerprint:
        raise ModelError(f"this is not the model that the plan was made for, {plan.model.name}")
    place = _place(plan, unit)
    priced, solution = _found(plan, shared)
    explanation = explain(priced.table, solution, place)
    return _said(plan, list(plan.units())[place], priced.table, explanation)


def _place(plan: Plan, unit: str) -> int:
    names = [one.name for one in plan.units()]
    if unit not in names:
        shown = ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])
        raise UsageError(f"the plan has no unit {unit!r}; its units are {shown}")
    return names.index(unit)


def _said(plan: Plan, unit: Unit, table: CostTable, found: Explanation) -> Why:
    shape = Shape.of(table)
    rank = shape.rank(found.chunk)
    in_flight = shape.in_flight(rank)
    held = [
        0.0 if option is None else option.held_bytes(in_flight) - found.chosen.held_bytes(in_flight)
        for option in (found.runner_up, found.fastest)
    ]
    estimates = {
        one.name: cost
        for r, stage in enumerate(plan.estimate.stages)
        for one, cost in zip(plan.units_of_rank(r), stage.units, strict=True)
    }
    cost = estimates[unit.name]
    time = "compute" if cost.compute_seconds >= cost.communication_seconds else "communication"
    return Why(
        unit=unit.name,
        rank=rank,
        strategy=unit.strategy,
        binds="memory" if found.binds == "memory" else time,
        runner_up=None if found.runner_up is None else found.runner_up.strategy,
        step_seconds=found.step_seconds,
        stage_seconds=found.stage_seconds,
        held_bytes=held[0],
        fastest=found.fastest.strategy,
        fastest_held_bytes=max(held[1], 0.0),
        seconds_per_gib=found.seconds_per_gib,
        peak_bytes=plan.estimate.peak_bytes[rank],
        budget_bytes=plan.cluster.memory_budget_bytes,
    )


# ----------------------------------------------------------------------------------------------- the plan's prices


def _found(plan: Plan, shared: FactsPricer) -> tuple[PricedTable, Solution]:
    """The table that the plan is of, and the plan in its terms. Raises UsageError where the space has no such plan."""
    kept = frozenset((unit.unit_class, unit.strategy) for unit in plan.units())
    limits = Limits(constraints=_demands(plan), kept=kept)
    request = Request(
        global_batch=plan.training.global_batch,
        seq_len=plan.training.seq_len,
        precision=plan.training.precision,
        optimizer=plan.training.optimizer,
        budget_bytes=plan.cluster.memory_budget_bytes,
    )
    candidate = _candidate(plan, request)
    tables = priced_tables(shared, candidate, request.budget_bytes, limits)
    known = [(priced, solution) for priced in tables if (solution := _solution(plan, priced.table)) is not None]
    if not known:
        raise UsageError("the search has no plan like this one, so there is nothing to hold its strategies against")
    return min(known, key=lambda pair: abs(pair[1].step_seconds - plan.estimate.step_seconds))


def _candidate(plan: Plan, request: Request) -> Candidate:
    """The outer choice of `plan`, in the searched space made as wide as the plan needs."""
    strategies = {unit.strategy for unit in plan.units()}
    blocks = [unit.strategy for unit in plan.units() if unit.is_block] or list(strategies)
    degrees = {(s.tp, s.cp) for s in strategies} | {(s.tp, s.cp) for s in blocks}
    mixed = RUNS.mixed_degrees or len(degrees) > 1 or len({s.sequence for s in blocks}) > 1
    features = Features(
        mixed_degrees=mixed,
        ulysses=RUNS.ulysses or any(s.sequence == "ulysses" for s in strategies),
        ring=RUNS.ring or any(s.sequence == "ring" for s in strategies),
        hybrid=RUNS.hybrid or any(s.zero and s.dp_replicate > 1 for s in strategies),
        experts=RUNS.experts,
        offload=RUNS.offload or any(s.offload for s in strategies),
        interleaved=RUNS.interleaved,
        zero_bubble=RUNS.zero_bubble,
    )
    pipeline, training = plan.pipeline, plan.training
    outer = outer_of(request, pipeline.degree, training.num_microbatches, pipeline.schedule, pipeline.virtual_stages)
    uniform = None if mixed else Degrees(blocks[0].tp, blocks[0].sequence)
    return Candidate(outer, plan.num_devices // pipeline.degree, uniform, features)


def _demands(plan: Plan) -> Constraints:
    """What was demanded of the plan, read back from how it says so."""
    pairs = [text.removeprefix("--").split(" ", 1) for text in (plan.search.demands if plan.search else ())]
    required, forbidden = ([text for kind, text in pairs if kind == wanted] for wanted in ("require", "forbid"))
    return read_constraints(required, forbidden)


def _solution(plan: Plan, table: CostTable) -> Solution | None:
    """The plan in the terms of `table`; None where that lacks one of its strategies."""
    shape, chosen = Shape.of(table), []
    for kind, unit in zip(table.chain, plan.units(), strict=True):
        chosen.append(next((o for o in table.options[kind] if o.strategy == unit.strategy), None))
    if any(option is None for option in chosen):
        return None
    return _with(table, shape, plan, [option for option in chosen if option is not None])


def _with(table: CostTable, shape: Shape, plan: Plan, chosen: Sequence[Option]) -> Solution:
    cut = [0]
    for stage in plan.stages:
        cut.append(cut[-1] + len(stage.units))
    stages, entry = [], None
    for chunk, (start, stop) in enumerate(pairwise(cut)):
        units = list(zip(table.chain[start:stop], chosen[start:stop], strict=True))
        in_flight = shape.in_flight(shape.rank(chunk))
        stages.append(stage_choice(units, in_flight, transitions=table.transitions, entry=entry))
        entry = chosen[stop - 1].layout if table.transitions else None
    return Solution(tuple(cut), tuple(stages), shape.step_seconds([stage.busy for stage in stages]))
