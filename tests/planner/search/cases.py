"""Small search problems: hypothesis strategies and brute force over every plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, groupby, pairwise, product

import numpy as np
from hypothesis import strategies as st

from galv.cost_models.estimate import StageSeconds
from galv.planner.partition import Counts
from galv.planner.plan import ScheduleName, Strategy
from galv.planner.search.shape import Shape
from galv.planner.search.table import CostTable, Option, Weights

whole = st.integers(1, 12).map(float)
SCHEDULES: list[tuple[ScheduleName, int]] = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)]
"""With how many chunks a rank."""


@st.composite
def options_of(draw: st.DrawFn, num_layouts: int = 1) -> Option:
    """One option; its weight gradients are none, half or all of backward."""
    backward = draw(whole)
    return Option(
        strategy=Strategy(),
        forward_seconds=draw(whole),
        backward_seconds=backward,
        step_seconds=float(draw(st.integers(0, 6))),
        state_bytes=draw(whole),
        activation_bytes=draw(whole),
        working_bytes=float(draw(st.integers(0, 8))),
        layout=draw(st.integers(0, num_layouts - 1)),
        weight_seconds=draw(st.sampled_from([0.0, 0.5, 1.0])) * backward,
    )


options = options_of()


@st.composite
def tables(
    draw: st.DrawFn,
    max_units: int = 6,
    max_options: int = 6,
    max_stages: int = 4,
    max_layouts: int = 3,
    most_plans: int = 50_000,
) -> CostTable:
    """Tables with one to three unit classes, small enough to enumerate; some layouts cannot stand next to each
    other.
    """
    chain = tuple(draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=max_units)))
    most = max(1, min(max_options, int(most_plans ** (1 / len(chain)) + 1e-9)))
    layouts = draw(st.integers(1, max_layouts))
    picks = {name: tuple(draw(st.lists(options_of(layouts), min_size=1, max_size=most))) for name in sorted(set(chain))}
    pairs = [(a, b) for a in range(layouts) for b in range(layouts) if a != b]
    changes = {pair: (float(draw(st.integers(0, 5))), float(draw(st.integers(0, 5)))) for pair in pairs}
    lost = draw(st.sets(st.sampled_from(pairs), max_size=2)) if pairs else set()
    schedule, virtual, stages = draw(_pipelines(len(chain), max_stages))
    return CostTable(
        chain=chain,
        options=picks,
        num_stages=stages,
        num_microbatches=draw(st.integers(1, 6)),
        schedule=schedule,
        transfer_seconds=draw(st.sampled_from([0.0, 0.0, 1.0])),
        usable_bytes=draw(st.integers(5, 160).map(float)),
        virtual_stages=virtual,
        transitions={pair: seconds for pair, seconds in changes.items() if pair not in lost},
    )


@st.composite
def _pipelines(draw: st.DrawFn, num_units: int, max_stages: int) -> tuple[ScheduleName, int, int]:
    """A schedule, its chunks a rank and its ranks."""
    known = [(name, v) for name, v in SCHEDULES if 2 * v <= num_units]
    if max_stages == 1 or not known or draw(st.integers(0, 4)) == 0:
        return "none", 1, 1
    schedule, virtual = draw(st.sampled_from(known))
    return schedule, virtual, draw(st.integers(2, min(max_stages, num_units // virtual)))


def runs(names: tuple[str, ...]) -> Counts:
    """Runs of equal names."""
    return tuple((name, len(list(run))) for name, run in groupby(names))


def every_cut(num_units: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a chain into non-empty chunks."""
    for inner in combinations(range(1, num_units), num_chunks - 1):
        yield (0, *inner, num_units)


class EveryPlan:
    """All choices of options for the chain of a table, as rows of numbers (choices, units)."""

    def __init__(self, table: CostTable) -> None:
        columns = [table.options[name] for name in table.chain]
        picks = np.array(list(product(*(range(len(column)) for column in columns))))
        self.table = table

        def numbers(of: str) -> np.ndarray:
            every = [np.array([float(getattr(option, of)) for option in column]) for column in columns]
            return np.stack([own[picks[:, unit]] for unit, own in enumerate(every)], axis=1)

        self.forward, self.backward = numbers("forward_seconds"), numbers("backward_seconds")
        self.weight, self.step = numbers("weight_seconds"), numbers("step_seconds")
        self.state, self.activation = numbers("state_bytes"), numbers("activation_bytes")
        self.working, self.layout = numbers("working_bytes"), numbers("layout").astype(int)
        self.possible = np.ones(len(picks), dtype=bool)
        for unit in range(1, len(columns)):
            self._change(unit)

    def _change(self, unit: int) -> None:
        for row, (before, after) in enumerate(self.layout[:, unit - 1 : unit + 1].tolist()):
            if before != after:
                change = self.table.transitions.get((before, after))
                self.possible[row] &= change is not None
                self.forward[row, unit] += change[0] if change else 0.0
                self.backward[row, unit] += change[1] if change else 0.0

    def peaks(self, units: list[int], in_flight: float) -> np.ndarray:
        """The peak bytes of a rank that holds some units, for each choice."""
        held = (self.state + in_flight * self.activation)[:, units].sum(axis=1)
        return held + self.working[:, units].max(axis=1)


def best_stage_by_force(table: CostTable, in_flight: float, weights: Weights) -> float | None:
    """The least weighted seconds of the whole chain as one stage that fits, None when none does."""
    every = EveryPlan(table)
    fits = every.possible & (every.peaks(list(range(len(table.chain))), in_flight) <= table.usable_bytes)
    forward, backward, step = weights
    seconds = (forward * every.forward + backward * every.backward + step * every.step).sum(axis=1)
    return float(seconds[fits].min()) if fits.any() else None


def best_by_force(table: CostTable) -> float | None:
    """The least step time over all plans that fit, None when none does."""
    every, shape, best = EveryPlan(table), Shape.of(table), None
    for cut in every_cut(len(table.chain), shape.num_chunks):
        fits = every.possible.copy()
        for rank in range(shape.num_ranks):
            units = [unit for chunk in shape.chunks(rank) for unit in range(cut[chunk], cut[chunk + 1])]
            fits &= every.peaks(units, shape.in_flight(rank)) <= table.usable_bytes
        parts = [every.forward, every.backward, every.step, every.weight]
        chunks = [[part[fits, start:stop].sum(axis=1) for part in parts] for start, stop in pairwise(cut)]
        for row in np.unique(np.array(chunks).transpose(2, 0, 1).reshape(-1, 4 * shape.num_chunks), axis=0):
            seconds = shape.step_seconds([StageSeconds(*times) for times in row.reshape(-1, 4).tolist()])
            best = seconds if best is None else min(best, seconds)
    return best
