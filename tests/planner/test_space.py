"""Sizes that the search counts with: divisors of any batch, lists that a person can read."""

from __future__ import annotations

import pytest

from galv.planner.plan import MAX_GLOBAL_BATCH
from galv.planner.space import divisors, listed


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
