"""The inner problem once more, as an integer linear program for HiGHS: an independent check of `assign`.

For every run of equal units in a stage and every option o, x[o] units take o. For layouts a, b, y[a, b] counts the
units of the run in layout b whose neighbour before has layout a: each unit has one, so sum over a of y[a, b] is the
number of units in layout b, and what is entered is left but for the run's last unit (z marks its layout). These
counts belong to one walk if the layouts in use hang together; where a solution has an island of layouts that nothing
enters, a constraint that forbids it is added and the program is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from galv.planner.highs import QuietHighs
from galv.planner.partition import Counts
from galv.planner.search.table import CostTable, Option, Weights


class _Solver(pulp.HiGHS):  # type: ignore[misc]  # pulp has no types
    """HiGHS as pulp calls it, silent."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = QuietHighs()  # type: ignore[no-untyped-call]  # nor has HiGHS
        lp.solverModel.setOptionValue("mip_rel_gap", self.gapRel)
        lp.solverModel.setOptionValue("mip_abs_gap", self.gapAbs)
        lp.solverModel.setOptionValue("threads", self.threads)


@dataclass(frozen=True)
class _Run:
    """The variables of one run of equal units."""

    number: int
    options: Sequence[Option]
    takes: list[pulp.LpVariable]
    used: list[pulp.LpVariable]
    steps: dict[tuple[int, int], pulp.LpVariable]
    ends: dict[int, pulp.LpVariable]


def fastest_seconds(
    table: CostTable,
    units: Counts,
    *,
    in_flight: float,
    weights: Weights,
    entry: int | None = None,
) -> float | None:
    """The least weighted seconds of a stage of `units` within the table's bytes; None when nothing fits."""
    problem = pulp.LpProblem("stage", pulp.LpMinimize)
    runs: list[_Run] = []
    for place, (name, number) in enumerate(units):
        runs.append(_added(problem, f"r{place}", table.options[name], number))
    entries = _linked(problem, runs, table, entry)
    problem += pulp.lpSum(
        [x * option.weighted(weights) for run in runs for x, option in zip(run.takes, run.options, strict=True)]
        + [y * _between(table, pair, weights) for run in runs for pair, y in run.steps.items()]
        + [y * _between(table, pair, weights) for links in entries for pair, y in links.items()]
    )
    scale = 1 / max(table.usable_bytes, 1.0)
    held = pulp.lpSum(
        x * (scale * option.held_bytes(in_flight))
        for run in runs
        for x, option in zip(run.takes, run.options, strict=True)
    )
    for run in runs:
        for used, option in zip(run.used, run.options, strict=True):
            problem += held + used * (scale * option.working_bytes) <= scale * table.usable_bytes
    while True:
        problem.solve(_Solver(msg=False, gapRel=0.0, gapAbs=0.0, threads=1))
        if problem.status != pulp.LpStatusOptimal:
            return None
        islands = [cut for run, links in zip(runs, entries, strict=True) if (cut := _island(run, links)) is not None]
        if not islands:
            return float(pulp.value(problem.objective))
        for cut in islands:
            problem += cut


def _added(problem: pulp.LpProblem, name: str, options: Sequence[Option], number: int) -> _Run:
    takes = [problem.add_variable(f"{name}x{i}", 0, number, "Integer") for i in range(len(options))]
    used = [problem.add_variable(f"{name}u{i}", 0, 1, "Integer") for i in range(len(options))]
    problem += pulp.lpSum(takes) == number
    for x, u in zip(takes, used, strict=True):
        problem += x <= number * u
    layouts = sorted({option.layout for option in options})
    steps = {(a, b): problem.add_variable(f"{name}y{a}_{b}", 0, number, "Integer") for a in layouts for b in layouts}
    ends = {a: problem.add_variable(f"{name}z{a}", 0, 1, "Integer") for a in layouts}
    problem += pulp.lpSum(ends.values()) == 1
    return _Run(number, options, takes, used, steps, ends)


def _linked(
    problem: pulp.LpProblem, runs: Sequence[_Run], table: CostTable, entry: int | None
) -> list[dict[tuple[int, int], pulp.LpVariable]]:
    """For each run the 0/1 variables of its entry: the layout before and that of its first unit."""
    found = []
    for place, run in enumerate(runs):
        if place:
            before: Sequence[int] = list(runs[place - 1].ends)
        else:
            before = list(run.ends) if entry is None else [entry]
        links = {
            (a, b): problem.add_variable(f"e{place}_{a}_{b}", 0, 1, "Integer")
            for a in before
            for b in run.ends
            if a == b or (a, b) in table.transitions
        }
        problem += pulp.lpSum(links.values()) == 1
        if place:
            for a in before:
                problem += pulp.lpSum(y for (x, _), y in links.items() if x == a) == runs[place - 1].ends[a]
        elif entry is None:
            for (a, b), y in links.items():
                if a != b:
                    problem += y == 0
        for pair, y in run.steps.items():
            if pair[0] != pair[1] and pair not in table.transitions:
                problem += y == 0
        for b in run.ends:
            units = pulp.lpSum(x for x, option in zip(run.takes, run.options, strict=True) if option.layout == b)
            entered = pulp.lpSum(y for (_, c), y in links.items() if c == b)
            come = pulp.lpSum(y for (_, c), y in run.steps.items() if c == b)
            gone = pulp.lpSum(y for (a, _), y in run.steps.items() if a == b)
            problem += come + entered == units
            problem += gone + run.ends[b] == units
        found.append(links)
    return found


def _between(table: CostTable, pair: tuple[int, int], weights: Weights) -> float:
    if pair[0] == pair[1]:
        return 0.0
    forward, backward = table.transitions.get(pair, (0.0, 0.0))
    return weights[0] * forward + weights[1] * backward


def _island(run: _Run, links: dict[tuple[int, int], pulp.LpVariable]) -> pulp.LpConstraint | None:
    """A constraint that the solution breaks and every walk keeps: layouts in use are reached from the first unit's."""
    reached = {b for (_, b), y in links.items() if y.value() > 0.5}
    grown = True
    while grown:
        more = {b for (a, b), y in run.steps.items() if y.value() > 0.5 and a in reached} - reached
        reached |= more
        grown = bool(more)
    apart = {
        option.layout
        for x, option in zip(run.takes, run.options, strict=True)
        if x.value() > 0.5 and option.layout not in reached
    }
    if not apart:
        return None
    units = pulp.lpSum(x for x, option in zip(run.takes, run.options, strict=True) if option.layout in apart)
    entering = pulp.lpSum(y for (a, b), y in run.steps.items() if b in apart and a not in apart)
    entering += pulp.lpSum(y for (_, b), y in links.items() if b in apart)
    return units <= run.number * entering
