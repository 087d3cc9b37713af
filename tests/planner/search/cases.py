"""Small search problems: hypothesis strategies and brute force over every plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from hypothesis import strategies as st

from galv.cost_models.pipeline import num_in_flight
from galv.planner.plan import Strategy
from galv.planner.search.assign import stage_choice
from galv.planner.search.solve import step_seconds
from galv.planner.search.table import CostTable, Option, StageChoice

whole = st.integers(1, 12).map(float)

options = st.builds(
    Option,
    strategy=st.just(Strategy()),
    forward_seconds=whole,
    backward_seconds=whole,
    step_seconds=st.integers(0, 6).map(float),
    state_bytes=whole,
    activation_bytes=whole,
    working_bytes=st.integers(0, 8).map(float),
)


@st.composite
def tables(draw: st.DrawFn, max_units: int = 6, max_options: int = 4, max_stages: int = 4) -> CostTable:
    """Tables with one to three unit classes, small enough to enumerate."""
    chain = tuple(draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=max_units)))
    picks = {name: tuple(draw(st.lists(options, min_size=1, max_size=max_options))) for name in sorted(set(chain))}
    num_stages = draw(st.integers(1, min(max_stages, len(chain))))
    return CostTable(
        chain=chain,
        options=picks,
        num_stages=num_stages,
        num_microbatches=draw(st.integers(1, 6)),
        schedule="none" if num_stages == 1 else draw(st.sampled_from(["gpipe", "1f1b"])),
        transfer_seconds=draw(st.sampled_from([0.0, 0.0, 1.0])),
        usable_bytes=draw(st.integers(5, 160).map(float)),
    )


def every_cut(num_units: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a chain into non-empty stages."""
    for inner in combinations(range(1, num_units), num_stages - 1):
        yield (0, *inner, num_units)


def every_plan(table: CostTable) -> Iterator[tuple[tuple[int, ...], tuple[StageChoice, ...]]]:
    """All plans of `table` that fit, as cuts and stage choices."""
    for cut in every_cut(len(table.chain), table.num_stages):
        stages = [list(_stage_choices(table, s, i, j)) for s, (i, j) in enumerate(pairwise(cut))]
        for choices in product(*stages):
            if all(choice.peak_bytes <= table.usable_bytes for choice in choices):
                yield cut, choices


def _stage_choices(table: CostTable, stage: int, start: int, stop: int) -> Iterator[StageChoice]:
    in_flight = num_in_flight(table.schedule, stage, table.num_stages, table.num_microbatches)
    names = table.chain[start:stop]
    for picked in product(*(table.options[name] for name in names)):
        by_class = {name: tuple((o, 1) for n, o in zip(names, picked, strict=True) if n == name) for name in names}
        yield stage_choice(tuple(by_class.items()), in_flight)


def best_by_force(table: CostTable) -> float | None:
    """The least step time over all plans that fit, None when none does."""
    return min((step_seconds(table, choices) for _, choices in every_plan(table)), default=None)
