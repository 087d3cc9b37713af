"""The outer search over made-up tables: the k best, step time against memory, explanations, limits."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galv.planner.plan import Strategy
from galv.planner.search.explain import explain
from galv.planner.search.memory import least_usable_bytes, tightest
from galv.planner.search.outer import BY_TIME, best_plans, budgets_between, pareto_front
from galv.planner.search.solution import Clock
from galv.planner.search.solve import solve
from galv.planner.search.table import CostTable, Option
from tests.planner.search.cases import tables

GIB = 2.0**30


def option(seconds: float, gib: float, zero: int = 1) -> Option:
    return Option(Strategy(dp_shard=2, zero=zero), seconds, 2 * seconds, 0.0, gib * GIB, 0.1 * GIB, 0.5 * GIB)


def chain_table(num_blocks: int = 30, num_stages: int = 8, usable_gib: float = 100.0) -> CostTable:
    """Equal blocks that trade seconds for bytes, no ends."""
    return CostTable(
        chain=("block",) * num_blocks,
        options={"block": (option(1.0, 4.0), option(1.25, 2.0, 3))},
        num_stages=num_stages,
        num_microbatches=16,
        schedule="none" if num_stages == 1 else "1f1b",
        transfer_seconds=0.0,
        usable_bytes=usable_gib * GIB,
    )


def test_thirty_layers_over_eight_stages_are_cut_evenly() -> None:
    """30 equal layers over 8 stages: six stages of 4 and two of 3, never a long last one."""
    found = solve(chain_table()).solution

    assert found is not None
    assert Counter(b - a for a, b in pairwise(found.cut)) == {4: 6, 3: 2}


def test_deep_chains_cost_no_more_than_shallow_ones() -> None:
    """The inner problem of 512 layers takes less than five times that of 64."""

    def cpu_seconds(depth: int) -> float:
        table, best = chain_table(depth, 1, 2.5 * depth + 8), float("inf")
        for _ in range(3):
            started = time.process_time()
            assert solve(table).solution is not None
            best = min(best, time.process_time() - started)
        return best

    assert cpu_seconds(512) < 5 * cpu_seconds(64) + 0.05


@settings(max_examples=25, deadline=None)
@given(st.lists(tables(max_units=4, most_plans=100), min_size=2, max_size=5), st.integers(1, 3))
def test_the_k_best_are_the_k_best(found: list[CostTable], number: int) -> None:
    """They are the least of all tables' optima, in order, and the best of them is proven."""
    solved = [solve(table).solution for table in found]
    expected = sorted(one.step_seconds for one in solved if one is not None)[:number]
    outcome = best_plans(found, number)

    assert [one.solution.step_seconds for one in outcome.best] == pytest.approx(expected)
    assert outcome.gap == pytest.approx(0.0, abs=1e-8)
    assert outcome.priced == len(found)


def test_the_front_falls_with_memory() -> None:
    """More memory along the front is always faster; the first budget is the least that does at all."""
    table = chain_table(8, 1, 40.0)
    front = pareto_front([table], budgets_between([table], 6), tolerance=0.0)
    seconds = [point.best.solution.step_seconds for point in front]

    assert front[0].usable_bytes == pytest.approx(least_usable_bytes(table)[0])
    assert len(front) > 2
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(8 * 3 * 16)


def test_a_unit_short_of_memory_says_so() -> None:
    """Under pressure memory binds and the faster option is what the unit would take; with room it is time."""
    tight, roomy = chain_table(8, 1, 22.0), chain_table(8, 1, 60.0)
    solution = solve(tight).solution
    assert solution is not None
    units = solution.stages[0].ordered(tight.chain)
    slow = next(i for i, one in enumerate(units) if one.forward_seconds > 1)

    found = explain(tight, solution, slow)
    assert found.binds == "memory"
    assert found.fastest.forward_seconds == 1.0
    assert found.runner_up is None  # not one fast unit more fits, and there is no third option
    assert found.seconds_per_gib > 0
    fast = next(i for i, one in enumerate(units) if one.forward_seconds == 1)
    found = explain(tight, solution, fast)
    assert found.runner_up is not None
    assert found.step_seconds == pytest.approx(0.75 * 16)

    solution = solve(roomy).solution
    assert solution is not None
    found = explain(roomy, solution, 0)
    assert found.binds == "time"
    assert found.step_seconds == pytest.approx(0.75 * 16)
    assert found.seconds_per_gib == 0


def test_no_time_is_said_with_its_gap() -> None:
    """A search without any time still finds a plan, and reports the time and what is open."""
    table = chain_table(12, 3)
    late = Clock(time.perf_counter() - 1)
    outcome = best_plans([table, replace(table, transfer_seconds=1e-9)], clock=late)

    assert outcome.best
    assert outcome.is_time_limited
    assert dict(outcome.pruned) == {BY_TIME: 1}
    assert 0 < outcome.gap < 1


def test_where_memory_binds_is_named() -> None:
    """The tightest rank of a 1F1B pipeline is its first, which has most microbatches in flight."""
    found = tightest([chain_table(8, 4, 1.0)])

    assert found.rank == 0
    assert found.unit_class == "block"
    assert found.usable_bytes == pytest.approx(least_usable_bytes(chain_table(8, 4, 1.0))[0])
