"""The search against brute force, and what more memory or more choice must never do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galv.planner.search.solve import least_usable_bytes, lower_bound_seconds, solve
from galv.planner.search.table import CostTable
from tests.planner.search.cases import best_by_force, options, tables

thorough = settings(max_examples=150, deadline=None)


@thorough
@given(tables(max_stages=1))
def test_one_stage_is_exact(table: CostTable) -> None:
    """Without a pipeline the search finds exactly what brute force finds, and proves it."""
    expected, found = best_by_force(table), solve(table)

    assert (found is None) == (expected is None)
    if found is not None:
        assert found.step_seconds == pytest.approx(expected)
        assert found.bound_seconds == pytest.approx(expected)


@thorough
@given(tables(max_units=5, max_options=3))
def test_pipelines_keep_their_word(table: CostTable) -> None:
    """The bound lies below the true optimum, the answer above it, and the answer is feasible when anything is."""
    expected, found = best_by_force(table), solve(table)

    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.bound_seconds <= expected * (1 + 1e-9)
        assert found.step_seconds >= expected * (1 - 1e-9)
        assert all(stage.peak_bytes <= table.usable_bytes for stage in found.stages)


@thorough
@given(tables())
def test_cheap_bound_is_a_bound(table: CostTable) -> None:
    """The bound that prunes whole tables never exceeds the optimum."""
    expected = best_by_force(
        replace(table, chain=table.chain[:4], num_stages=min(table.num_stages, len(table.chain[:4])))
    )
    small = replace(table, chain=table.chain[:4], num_stages=min(table.num_stages, len(table.chain[:4])))

    if expected is not None:
        assert lower_bound_seconds(small) <= expected * (1 + 1e-9)


@thorough
@given(tables(max_units=5, max_options=3))
def test_least_memory_is_the_least(table: CostTable) -> None:
    """With the reported least memory a plan fits; under a little less none does."""
    least, _ = least_usable_bytes(table)

    assert solve(replace(table, usable_bytes=least + 1e-6)) is not None
    assert solve(replace(table, usable_bytes=least - 1e-3)) is None


@thorough
@given(tables(max_stages=1), st.floats(0, 50))
def test_more_memory_never_hurts(table: CostTable, extra: float) -> None:
    """A larger budget gives an equal or faster plan."""
    before, after = solve(table), solve(replace(table, usable_bytes=table.usable_bytes + extra))

    if before is not None:
        assert after is not None
        assert after.step_seconds <= before.step_seconds + 1e-9


@thorough
@given(tables(max_stages=1), options)
def test_more_options_never_hurt(table: CostTable, option) -> None:
    """One more strategy for a class gives an equal or faster plan."""
    name = table.chain[0]
    wider = replace(table, options={**table.options, name: (*table.options[name], option)})
    before, after = solve(table), solve(wider)

    if before is not None:
        assert after is not None
        assert after.step_seconds <= before.step_seconds + 1e-9
