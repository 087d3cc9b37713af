"""The search against brute force, and what more memory, more choice or longer times must do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galv.planner.search.assign import Assigner
from galv.planner.search.integer import fastest_seconds
from galv.planner.search.memory import least_usable_bytes, rank_peak_bytes
from galv.planner.search.solve import lower_bound_seconds, solve
from galv.planner.search.table import CostTable, Option
from tests.planner.search.cases import best_by_force, best_stage_by_force, options, runs, tables

thorough = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WEIGHTS = [(2.0, 2.0, 1.0), (1.0, 3.0, 0.0), (0.0, 1.0, 1.0)]


@thorough
@given(tables(max_stages=1), st.sampled_from([1.0, 2.0, 2.5]), st.sampled_from(WEIGHTS))
def test_both_solvers_of_a_stage_agree_with_brute_force(table: CostTable, in_flight: float, weights) -> None:
    """Frontiers and integer program find the optimum over all sequences of options, with layouts, or that none fits."""
    expected = best_stage_by_force(table, in_flight, weights)
    units = runs(table.chain)

    found = Assigner.of(table).fastest(units, in_flight=in_flight, weights=weights, usable_bytes=table.usable_bytes)
    other = fastest_seconds(table, units, in_flight=in_flight, weights=weights)

    assert (None if found is None else found.busy.weighted(weights)) == pytest.approx(expected)
    assert other == pytest.approx(expected)
    assert found is None or found.peak_bytes <= table.usable_bytes
    assert found is None or [name for name, _ in found.units()] == list(table.chain) or len(units) > 1


@thorough
@given(tables(most_plans=1300))
def test_the_search_agrees_with_brute_force(table: CostTable) -> None:
    """Under every schedule the answer is the optimum over all cuts and choices, and proven so."""
    expected, found = best_by_force(table), solve(table)

    assert (found.solution is None) == (expected is None)
    if found.solution is not None:
        assert found.solution.step_seconds == pytest.approx(expected)
        assert found.bound_seconds == pytest.approx(expected)
        assert max(rank_peak_bytes(table, found.solution)) <= table.usable_bytes
        assert lower_bound_seconds(table) <= found.solution.step_seconds * (1 + 1e-9)


@thorough
@given(tables(most_plans=300), st.floats(0.5, 1.5))
def test_what_cannot_beat_the_incumbent_is_not_found(table: CostTable, share: float) -> None:
    """A solution faster than the incumbent is found if there is one, and no other."""
    best = solve(table).solution
    if best is None:
        return
    incumbent = share * best.step_seconds
    found = solve(table, incumbent_seconds=incumbent)

    assert (found.solution is not None) == (best.step_seconds < incumbent * (1 - 1e-9)) or share == pytest.approx(1)
    assert found.bound_seconds <= best.step_seconds * (1 + 1e-9)


@thorough
@given(tables(max_units=5, max_options=3, max_layouts=1))
def test_least_memory_is_the_least(table: CostTable) -> None:
    """With the reported least memory a plan fits; under a little less none does, where each rank has one chunk."""
    least, _ = least_usable_bytes(table)

    assert solve(replace(table, usable_bytes=least + 1e-6)).solution is not None
    if table.virtual_stages == 1:
        assert solve(replace(table, usable_bytes=least - 1e-3)).solution is None


@thorough
@given(tables(most_plans=300), st.floats(0, 50))
def test_more_memory_never_hurts(table: CostTable, extra: float) -> None:
    """A larger budget gives an equal or faster plan."""
    before = solve(table).solution
    after = solve(replace(table, usable_bytes=table.usable_bytes + extra)).solution

    if before is not None:
        assert after is not None
        assert after.step_seconds <= before.step_seconds + 1e-9


@thorough
@given(tables(most_plans=300), options)
def test_more_options_never_hurt(table: CostTable, option: Option) -> None:
    """One more strategy for a class gives an equal or faster plan."""
    name = table.chain[0]
    wider = replace(table, options={**table.options, name: (*table.options[name], option)})
    before, after = solve(table).solution, solve(wider).solution

    if before is not None:
        assert after is not None
        assert after.step_seconds <= before.step_seconds + 1e-9


@thorough
@given(tables(most_plans=300), st.sampled_from([0.125, 3.0, 1000.0]))
def test_scaling_all_times_scales_the_step(table: CostTable, factor: float) -> None:
    """Seconds have no natural unit: times k times as long give a step k times as long."""
    before, after = solve(table).solution, solve(_scaled(table, factor)).solution

    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.step_seconds == pytest.approx(factor * before.step_seconds)


def _scaled(table: CostTable, factor: float) -> CostTable:
    def scaled(option: Option) -> Option:
        return replace(
            option,
            forward_seconds=factor * option.forward_seconds,
            backward_seconds=factor * option.backward_seconds,
            step_seconds=factor * option.step_seconds,
            weight_seconds=factor * option.weight_seconds,
        )

    return replace(
        table,
        options={name: tuple(map(scaled, own)) for name, own in table.options.items()},
        transfer_seconds=factor * table.transfer_seconds,
        transitions={pair: (factor * f, factor * b) for pair, (f, b) in table.transitions.items()},
    )
