"""Bytes instead of seconds: the least memory that would do, and where it binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from galv.planner.partition import least_maximum, segments, stage_mask
from galv.planner.search.assign import Assigner
from galv.planner.search.shape import Shape
from galv.planner.search.solution import Solution
from galv.planner.search.table import CostTable


def least_usable_bytes(table: CostTable) -> tuple[float, tuple[int, ...]]:
    """The least usable bytes per device under which some plan of `table` fits, and that plan's cut.

    With several chunks a rank, the least under a cut that spreads the bytes evenly over the chunks.
    """
    shape, assigner = Shape.of(table), Assigner.of(table)
    if shape.num_chunks > len(table.chain):
        return np.inf, ()
    if table.virtual_stages > 1:
        return _of_even_chunks(table, shape, assigner)
    known = segments(table.chain)
    costs = []
    for stage in range(shape.num_ranks):
        mask = stage_mask(stage, shape.num_ranks, len(table.chain))
        values = np.full(len(known.counts), np.inf)
        for i in np.unique(known.ids[mask]):
            values[i] = assigner.smallest_bytes(known.counts[i], in_flight=shape.in_flight(stage))
        costs.append(np.where(mask, values[known.ids], np.inf))
    return least_maximum(costs)


def _of_even_chunks(table: CostTable, shape: Shape, assigner: Assigner) -> tuple[float, tuple[int, ...]]:
    in_flight = max(shape.in_flight(rank) for rank in range(shape.num_ranks))
    each = [min(o.held_bytes(in_flight) for o in table.options[name]) for name in table.chain]
    upto = np.concatenate(([0.0], np.cumsum(each)))
    places = np.arange(len(upto))
    costs = np.where(places[:, None] < places[None, :], upto[None, :] - upto[:, None], np.inf)
    _, cut = least_maximum([costs] * shape.num_chunks)
    peaks = []
    for rank in range(shape.num_ranks):
        names = [name for chunk in shape.chunks(rank) for name in table.chain[cut[chunk] : cut[chunk + 1]]]
        units = tuple((name, len(list(run))) for name, run in groupby(names))
        peaks.append(assigner.smallest_bytes(units, in_flight=shape.in_flight(rank)))
    return max(peaks), cut


@dataclass(frozen=True)
class Tightest:
    """The plan that would need least memory, and what holds most of it there."""

    table: int
    """Its place among the tables."""
    usable_bytes: float
    """What it needs on the fullest device."""
    cut: tuple[int, ...]
    rank: int
    """The fullest rank."""
    unit_class: str
    """The class whose units hold most there."""
    unit_bytes: float
    """What the units of that class hold there, all together."""


def tightest(tables: Sequence[CostTable]) -> Tightest:
    """Where memory binds when nothing fits: the smallest budget that would do, its fullest rank and class there."""
    least = [least_usable_bytes(table) for table in tables]
    place = min(range(len(tables)), key=lambda i: least[i][0])
    table, (usable, cut) = tables[place], least[place]
    shape, assigner = Shape.of(table), Assigner.of(table)
    found: list[tuple[float, int, str, float]] = []
    for rank in range(shape.num_ranks):
        names = [name for chunk in shape.chunks(rank) for name in table.chain[cut[chunk] : cut[chunk + 1]]]
        units = tuple((name, len(list(run))) for name, run in groupby(names))
        in_flight = shape.in_flight(rank)
        held = {n: names.count(n) * min(o.held_bytes(in_flight) for o in table.options[n]) for n in names}
        most = max(held, key=lambda name: held[name])
        found.append((assigner.smallest_bytes(units, in_flight=in_flight), rank, most, held[most]))
    _, rank, unit_class, unit_bytes = max(found)
    return Tightest(place, usable, cut, rank, unit_class, unit_bytes)


def rank_peak_bytes(table: CostTable, solution: Solution) -> tuple[float, ...]:
    """The peak bytes of each pipeline rank under a solution of `table`."""
    shape, peaks = Shape.of(table), []
    for rank in range(shape.num_ranks):
        options = [option for chunk in shape.chunks(rank) for _, option in solution.stages[chunk].units()]
        held = sum(option.held_bytes(shape.in_flight(rank)) for option in options)
        peaks.append(held + max(option.working_bytes for option in options))
    return tuple(peaks)


def least_memory(table: CostTable) -> CostTable:
    """`table` with a budget that only its plans of least memory fit in."""
    return replace(table, usable_bytes=least_usable_bytes(table)[0] * (1 + 1e-9) + 1e-6)
