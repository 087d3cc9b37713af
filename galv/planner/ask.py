"""A planning request from the captured model to plans: the best, the k best, and step time against memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from galv.cost_models.memory import reserved_bytes
from galv.cost_models.unit import FactsPricer
from galv.errors import NoFeasiblePlan, UsageError
from galv.planner.assemble import assemble
from galv.planner.clusters import of_shape, parts_of
from galv.planner.front import Front
from galv.planner.habits import alternatives
from galv.planner.plan import Plan
from galv.planner.planner import Answer, Objective, Space, all_tables, best_answers
from galv.planner.relaxations import relaxations
from galv.planner.reporter import Reporter
from galv.planner.search.outer import ParetoPoint, budgets_between, pareto_front
from galv.planner.space import RUNS, Features, Request, candidates
from galv.planner.tables import Limits, PricedTable


@dataclass(frozen=True)
class Question:
    """A captured model, what to train, and what is asked of the plan."""

    shared: FactsPricer
    request: Request
    source: str | None = None
    inputs_source: str | None = None
    limits: Limits = Limits()  # noqa: RUF009  # frozen
    objective: Objective = "throughput"
    time_limit_seconds: float | None = None
    features: Features = RUNS

    def spaces(self) -> list[Space]:
        """The candidates; by cost also those of parts of the cluster. Raises UsageError when there are none at all."""
        if self.objective != "cost":
            return [(self.shared, candidates(self.shared.graph, self.shared.cluster, self.request, self.features))]
        return list(self._parts())

    def _parts(self) -> Iterator[Space]:
        graph, found, errors = self.shared.graph, 0, []
        for part in parts_of(self.shared.cluster):
            shared = self.shared if part == self.shared.cluster else FactsPricer(graph, part)
            try:
                yield shared, candidates(graph, part, self.request, self.features)
            except UsageError as error:
                errors.append(error)
            else:
                found += 1
        if not found:
            raise errors[-1]


def best_plans(question: Question, number: int, reporter: Reporter) -> tuple[Plan, ...]:
    """The `number` best plans, best first, beside the layouts that people choose by habit.

    Raises UsageError, and NoFeasiblePlan that says which changes would do.
    """
    try:
        found = answered(question, number, reporter)
    except NoFeasiblePlan as error:
        raise _with_remedies(error, question, reporter) from None
    used = of_shape(question.shared.cluster, found[0].cluster.devices_per_node, found[0].cluster.num_nodes)
    shared = question.shared if used == question.shared.cluster else FactsPricer(question.shared.graph, used)
    habits = alternatives(shared, question.request)
    return tuple(plan.model_copy(update={"alternatives": habits}) for plan in found)


def answered(question: Question, number: int = 1, reporter: Reporter | None = None) -> tuple[Plan, ...]:
    """The `number` best plans, best first, and nothing beside them. Raises UsageError and NoFeasiblePlan."""
    answers = best_answers(
        question.spaces(),
        question.request.budget_bytes,
        number,
        limits=question.limits,
        reporter=reporter,
        objective=question.objective,
        time_limit_seconds=question.time_limit_seconds,
    )
    return tuple(_plan(question, answer) for answer in answers)


def _plan(question: Question, answer: Answer) -> Plan:
    demands = tuple(map(str, question.limits.constraints.demands))
    plan = assemble(
        answer.priced,
        answer.solution,
        question.request,
        source=question.source,
        inputs_source=question.inputs_source,
        alternatives=(),
        search=answer.report.model_copy(update={"objective": question.objective, "demands": demands}),
    )
    used, there = plan.num_devices, question.shared.cluster.num_devices
    if used == there:
        return plan
    return plan.model_copy(update={"notes": (*plan.notes, f"fewest device-hours a sample: {used} of {there} devices")})


def _with_remedies(error: NoFeasiblePlan, question: Question, reporter: Reporter) -> NoFeasiblePlan:
    """`error`, saying which changes would do."""
    reporter.phase("nothing fits: trying changes")
    found, missed = relaxations(question.shared, question.request, question.limits, question.features)
    remedies = [f"it would fit with {relaxation}" for relaxation in found]
    if missed:
        remedies.append(f"not enough alone: {', '.join(missed)}")
    return NoFeasiblePlan(
        error.message, smallest_budget_bytes=error.smallest_budget_bytes, causes=(*error.causes, *remedies)
    )


def front(question: Question, number: int, reporter: Reporter) -> Front:
    """The best plans under about `number` budgets from the smallest that does to the request's own.

    Raises UsageError and NoFeasiblePlan.
    """
    priced = all_tables(question.spaces(), question.request.budget_bytes, question.limits, reporter)
    tables = [one.table for one in priced]
    budgets = budgets_between(tables, number)
    if budgets[0] > tables[0].usable_bytes:
        best_plans(question, 1, reporter)  # says why nothing fits
    points = pareto_front(tables, budgets, time_limit_seconds=question.time_limit_seconds, watch=reporter.progress)
    return Front(tuple(_plan_within(question, priced[point.best.table], point) for point in points))


def _plan_within(question: Question, priced: PricedTable, point: ParetoPoint) -> Plan:
    """The plan of a point of the front, with the point's budget as its own."""
    device = priced.pricer.cluster.device
    budget = min(ceil(point.usable_bytes) + reserved_bytes(point.usable_bytes, device), question.request.budget_bytes)
    return assemble(
        priced,
        point.best.solution,
        replace(question.request, budget_bytes=budget),
        source=question.source,
        inputs_source=question.inputs_source,
        alternatives=(),
        search=None,
    )
