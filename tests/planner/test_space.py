"""Sizes that the search counts with: divisors of any batch, lists that a person can read."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.unit import Degrees, FactsPricer
from galv.planner.plan import MAX_GLOBAL_BATCH, Strategy
from galv.planner.space import (
    EVERYTHING,
    RUNS,
    Features,
    Request,
    candidates,
    divisors,
    exclusions,
    listed,
    schedules,
)
from galv.planner.tables import PricedTable, priced_tables, undominated
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder


@pytest.mark.parametrize("number", [1, 2, 3, 4, 12, 97, 360, 1023, 4096])
def test_divisors_are_all_that_divide(number: int) -> None:
    """As trying every number finds them."""
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_the_divisors_of_the_largest_batch() -> None:
    """Forty bits are no obstacle, also where the number is a prime."""
    assert divisors(MAX_GLOBAL_BATCH) == [2**power for power in range(41)]
    assert divisors(2**40 - 87) == [1, 2**40 - 87]


def test_long_lists_are_cut_in_the_middle() -> None:
    """A dozen numbers are all shown; of more, the first ten and the last two."""
    assert listed(range(12, 0, -1)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert listed(range(1, 100)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ..., 98, 99"


# ----------------------------------------------------------------------------------------------- strategies

GIB = 2**30
REQUEST = Request(global_batch=64, seq_len=1024, precision="bf16", optimizer="adamw", budget_bytes=79 * GIB)


def tables(
    features: Features, spec: str = "h100-sxm-80:8x1", every: int = 1, pp: int | None = None, **model: object
) -> list[PricedTable]:
    """The tables of all candidates of a decoder, or of every so many, or of one pipeline degree."""
    shared = FactsPricer(decoder(**model), load_cluster(spec))  # type: ignore[arg-type]
    found = candidates(shared.graph, shared.cluster, REQUEST, features)[::every]
    found = [one for one in found if pp in (None, one.outer.pp)]
    return [table for candidate in found for table in priced_tables(shared, candidate, REQUEST.budget_bytes)]


def strategies(found: list[PricedTable], unit_class: str = "Block") -> set[Strategy]:
    return {option.strategy for table in found for option in table.table.options[unit_class]}


def test_every_option_covers_its_stage_with_whole_samples() -> None:
    """The degrees multiply to the stage's devices, and a microbatch is a whole number of samples."""
    for one in tables(EVERYTHING, every=17, experts=4):
        outer = one.candidate.outer
        for options in one.table.options.values():
            for option in options:
                assert option.strategy.num_devices == one.candidate.num_devices
                assert REQUEST.global_batch % (outer.num_microbatches * option.strategy.dp) == 0


def test_what_the_runtime_does_not_run_is_not_searched() -> None:
    """The default space is what RUNS says, and everything that is left out says why."""
    found = tables(RUNS, every=17)
    shared = FactsPricer(decoder(num_heads=4), load_cluster("h100-sxm-80:8x1"))
    reasons = dict(exclusions(shared, REQUEST))

    if not RUNS.ulysses:
        assert {s.cp for s in strategies(found)} == {1}
        assert "sequence=ulysses" in reasons
    if not RUNS.offload:
        assert {s.offload for s in strategies(found)} == {()}
        assert reasons["offload"] == "galv's runtime does not run it"
    assert "4 heads do not divide by 8" in reasons["Block: tp=8"]


def test_units_of_one_table_choose_their_own_degrees() -> None:
    """Tensor, context, data and expert degrees, shards, replicas, levels, recomputation and offload, side by side."""
    features = replace(EVERYTHING, interleaved=False, zero_bubble=False)
    found = tables(features, pp=1, attention=True, experts=4)
    chosen = strategies(found)

    assert {s.tp for s in chosen} == {1, 2, 4, 8}
    assert {s.sequence for s in chosen} >= {"none", "megatron", "ulysses"}
    assert {s.zero for s in chosen} == {0, 1, 2, 3}
    assert {s.ep for s in chosen} == {1, 2, 4}
    assert any(s.zero and s.dp_replicate > 1 for s in chosen)
    assert {what for s in chosen for what in s.offload} == {"activations", "optimizer", "parameters"}
    assert {s.cp for s in strategies(found, "head")} == {1}


def test_layouts_of_a_table_have_transitions() -> None:
    """Between any two of a mixed table; a table whose units share their degrees needs none."""
    mixed = next(one.table for one in tables(Features(mixed_degrees=True)) if one.candidate.outer.pp == 1)
    layouts = {option.layout for options in mixed.options.values() for option in options}

    assert len(layouts) > 3
    assert set(mixed.transitions) == {(a, b) for a in layouts for b in layouts if a != b}
    assert any(forward > 0 for forward, _ in mixed.transitions.values())
    assert all(not one.table.transitions for one in tables(Features()))


def test_no_option_is_worse_than_another_of_its_layout() -> None:
    """In every number."""
    for one in tables(replace(EVERYTHING, interleaved=False, zero_bubble=False), every=23):
        for name, options in one.table.options.items():
            if name == "head" and one.candidate.outer.pp > 1:
                continue  # which of its bytes are held while it runs depends on the schedule
            for layout in {option.layout for option in options}:
                same = [option for option in options if option.layout == layout]
                numbers = [tuple(getattr(option, name) for name in NUMBERS) for option in same]
                assert len(set(numbers)) == len(numbers)
                assert not any(
                    a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in numbers for b in numbers
                )


NUMBERS = (
    "forward_seconds",
    "backward_seconds",
    "step_seconds",
    "state_bytes",
    "activation_bytes",
    "working_bytes",
)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=12))
def test_undominated_rows_are_those_that_trying_all_pairs_leaves(points: list[tuple[int, int, int]]) -> None:
    """Of equal rows the first stays."""
    numbers = np.array(points, dtype=float)
    expected = [
        j
        for j, mine in enumerate(points)
        if not any(
            all(x <= y for x, y in zip(other, mine, strict=True)) and (other != mine or i < j)
            for i, other in enumerate(points)
            if i != j
        )
    ]

    assert undominated(numbers).tolist() == expected


def test_pricing_a_large_cluster_takes_a_second_or_two() -> None:
    """128 units on 16,384 devices: units that differ in all degrees, shards and replicas in every way."""
    shared = FactsPricer(decoder(num_layers=126, hidden=8192, num_heads=64), load_cluster("h100-sxm-80:8x2048"))
    wanted = replace(REQUEST, global_batch=2048)
    started = time.process_time()
    features = Features(mixed_degrees=True, hybrid=True)
    found = [one for one in candidates(shared.graph, shared.cluster, wanted, features) if one.outer.pp <= 4]
    num_options = [
        len(options)
        for candidate in found
        for one in priced_tables(shared, candidate, REQUEST.budget_bytes)
        for options in one.table.options.values()
    ]

    assert len(found) > 20
    assert max(num_options) > 20
    assert time.process_time() - started < 3


def test_tied_units_share_their_tensor_in_one_way() -> None:
    """Within one table, embedding and head have one tensor degree, level and shard degree."""
    for one in tables(Features(mixed_degrees=True), tied=True):
        ways = {
            (option.strategy.tp, option.strategy.zero, option.strategy.dp_shard)
            for name in ("embedding", "head")
            for option in one.table.options[name]
        }
        assert len(ways) == 1


def test_schedules_that_are_switched_on() -> None:
    """Interleaved with every divisor of a rank's blocks, zero-bubble ones with their chunks; none on a single stage."""
    graph, features = decoder(num_layers=16), Features(interleaved=True, zero_bubble=True)

    assert schedules(graph, 1, 8, features) == [("none", 1)]
    assert schedules(graph, 4, 2, features) == [("gpipe", 1)]
    assert schedules(graph, 2, 8, features) == [
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("interleaved", 8),
        ("zb-h1", 1),
        ("zbv", 2),
    ]
    assert schedules(graph, 2, 8, Features()) == [("1f1b", 1), ("gpipe", 1)]


def test_context_axes_are_left_out_where_data_parallelism_does_as_much() -> None:
    """A microbatch of two samples on two context ranks costs no less than one sample on each of two data ranks."""
    graph = decoder(attention=True, num_heads=16)
    shared = FactsPricer(graph, load_cluster("h100-sxm-80:8x1"))
    for mode in ("ulysses", "ring"):
        for cp in (2, 4):
            together = shared.priced("Block", Degrees(1, mode, cp), 2 * cp)
            apart = shared.priced("Block", Degrees(), 2)
            assert together.forward_seconds + together.forward_sent_seconds >= apart.forward_seconds
            assert together.backward_seconds + together.backward_sent_seconds >= apart.backward_seconds
            assert together.facts.saved_bytes >= apart.facts.saved_bytes * (1 - 1e-9)

    found = candidates(graph, shared.cluster, REQUEST, EVERYTHING)
    contexts = [one for one in found if one.uniform is not None and one.uniform.cp > 1]
    assert contexts
    for one in contexts:
        assert one.uniform is not None
        assert one.outer.microbatch(one.num_devices // one.uniform.num_ranks) == 1


def test_ends_of_a_pipeline_choose_their_own_degrees() -> None:
    """The blocks of a table share their degrees; embedding and head do not, and pay for what lies between."""
    found = tables(Features(mixed_degrees=True), pp=2)
    chosen = {option.strategy.tp for one in found for option in one.table.options["head"]}

    assert len(chosen) > 1
    for one in found:
        degrees = {(o.strategy.tp, o.strategy.sequence, o.strategy.cp) for o in one.table.options["Block"]}
        assert len(degrees) == 1
        assert not one.table.transitions
