"""Why a unit has its strategy: the next best one, what switching would cost, and what binds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from galv.planner.search.assign import Assigner
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Solution
from galv.planner.search.table import CostTable, Option, StageChoice


@dataclass(frozen=True)
class Explanation:
    """One unit's choice against its runner-up."""

    unit_class: str
    chunk: int
    """Which of the plan's stages the unit is in."""
    chosen: Option
    runner_up: Option | None
    """The option of which one unit more would cost the step least; None when no other fits."""
    stage_seconds: float
    """What switching adds to the stage's busy seconds of a step, the stage's other units chosen anew."""
    step_seconds: float
    """What it adds to the step; less where the stage waits for others anyway, below 0 by what a search left open."""
    binds: Literal["memory", "time"]
    """Memory, when the unit would do otherwise with more of it; else time: its option is the fastest there is."""
    fastest: Option
    """What the unit would take if memory were free."""
    seconds_per_gib: float
    """By how much the stage's step would be shorter per GiB more, as far as one unit's change goes; 0 if memory is
    free.
    """


def explain(table: CostTable, solution: Solution, unit: int) -> Explanation:
    """Why unit number `unit` of the chain has its option in `solution`, a plan of `table`."""
    shape = Shape.of(table)
    chunk = next(c for c, stop in enumerate(solution.cut[1:]) if unit < stop)
    start = solution.cut[chunk]
    names = table.chain[start : solution.cut[chunk + 1]]
    chosen = solution.stages[chunk].ordered(names)[unit - start]
    stage = _Stage(table, shape, solution, chunk, names, unit - start)
    tried = [(stage.with_option(option), option) for option in table.options[names[unit - start]] if option != chosen]
    found = [(stage.step_seconds(choice), choice, option) for choice, option in tried if choice is not None]
    step, choice, runner_up = min(found, key=lambda one: one[0], default=(np.inf, None, None))
    now, weights = solution.stages[chunk].busy.weighted(shape.busy), shape.busy
    fastest = min(table.options[names[unit - start]], key=lambda option: option.weighted(weights))
    return Explanation(
        unit_class=names[unit - start],
        chunk=chunk,
        chosen=chosen,
        runner_up=runner_up,
        stage_seconds=np.inf if choice is None else choice.busy.weighted(weights) - now,
        step_seconds=step - solution.step_seconds,
        binds="time" if chosen.weighted(weights) <= fastest.weighted(weights) * (1 + 1e-12) else "memory",
        fastest=fastest,
        seconds_per_gib=stage.seconds_per_byte() * 2**30,
    )


@dataclass(frozen=True)
class _Stage:
    """The stage that a unit is in, with the rest of the plan as it is."""

    table: CostTable
    shape: Shape
    solution: Solution
    chunk: int
    names: tuple[str, ...]
    unit: int

    def with_option(self, option: Option) -> StageChoice | None:
        """The stage at its fastest with one unit more of that option: units like this one cannot change places."""
        alone, own = "\0unit", self.names[self.unit]
        now = self.solution.stages[self.chunk].ordered(self.names)
        given = {i for i, name in enumerate(self.names) if name == own and now[i] == option} | {self.unit}
        names = [alone if i in given else name for i, name in enumerate(self.names)]
        assigner = Assigner({**self.table.options, alone: (option,)}, self.table.transitions)
        return assigner.fastest(
            tuple((name, len(list(run))) for name, run in groupby(names)),
            in_flight=self.in_flight,
            weights=self.shape.busy,
            usable_bytes=self.available_bytes,
            entry=self.entry,
        )

    def step_seconds(self, choice: StageChoice) -> float:
        """The step with the stage chosen so."""
        stages = [*self.solution.stages]
        stages[self.chunk] = choice
        return self.shape.step_seconds([stage.busy for stage in stages])

    def seconds_per_byte(self) -> float:
        """What one byte more is worth to the stage."""
        units = tuple((name, len(list(run))) for name, run in groupby(self.names))
        return Assigner.of(self.table).byte_price(
            units, in_flight=self.in_flight, weights=self.shape.busy, usable_bytes=self.available_bytes
        )

    @property
    def in_flight(self) -> float:
        return self.shape.in_flight(self.shape.rank(self.chunk))

    @property
    def entry(self) -> int | None:
        return self.solution.stages[self.chunk - 1].last.layout if self.chunk and self.table.transitions else None

    @property
    def available_bytes(self) -> float:
        """The budget less what the rank's other chunks hold."""
        others = [c for c in self.shape.chunks(self.shape.rank(self.chunk)) if c != self.chunk]
        held = [o.held_bytes(self.in_flight) for c in others for _, o in self.solution.stages[c].units()]
        return self.table.usable_bytes - sum(held)
