"""Works that run together: no faster than the longest, no slower than one after the other."""

from __future__ import annotations

from itertools import combinations

import pytest

from galv.cost_models.communication import Group
from galv.cost_models.overlap import exposed_seconds, resource_of, together_seconds
from galv.profiles.device import OverlapSlowdown, Resource, device_names, load_device

A100 = load_device("a100-sxm-40").overlap
WORKS: list[tuple[Resource, float]] = [("compute", 3.0), ("link", 2.0), ("network", 1.5), ("host", 1.0)]


def level(value: float) -> OverlapSlowdown:
    pairs = [name for name in OverlapSlowdown.model_fields if name != "sources"]
    return OverlapSlowdown(**dict.fromkeys(pairs, value), sources=dict.fromkeys(pairs, "a test"))


def test_undisturbed_works_take_the_longest_and_serial_ones_the_sum() -> None:
    """The two ends of the scale, for any number of works."""
    for count in range(1, 5):
        for works in combinations(WORKS, count):
            assert together_seconds(works, level(1.0)) == pytest.approx(max(seconds for _, seconds in works))
            assert together_seconds(works, level(2.0)) == pytest.approx(sum(seconds for _, seconds in works))


def test_a_pair_is_what_exposed_seconds_says() -> None:
    """Two works together, by either function."""
    for compute, sent in ((3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 0.0)):
        together = together_seconds([("compute", compute), ("link", sent)], A100)
        slowdown = A100.between("compute", "link")
        assert together == pytest.approx(compute + exposed_seconds(compute, sent, slowdown))


def test_a_work_more_never_ends_sooner_nor_later_than_one_after_the_other() -> None:
    """On every device, whatever the pairs."""
    for name in device_names():
        overlap = load_device(name).overlap
        sofar = 0.0
        for count in range(1, 5):
            found = together_seconds(WORKS[:count], overlap)
            assert sofar <= found * (1 + 1e-9), name
            assert found <= sum(seconds for _, seconds in WORKS[:count]) * (1 + 1e-9), name
            sofar = found


def test_copies_both_ways_are_a_pair_and_one_resource_is_a_queue() -> None:
    """Copies to and from the host have their own slowdown; two works of the links stand in line."""
    assert together_seconds([("host", 1.0), ("host", 1.0)], A100) == pytest.approx(A100.host_host)
    assert together_seconds([("link", 1.0), ("link", 1.0)], A100) == pytest.approx(2.0)
    assert together_seconds([], A100) == 0.0


def test_a_group_occupies_links_or_the_network() -> None:
    """One node or several."""
    assert resource_of(Group(8, 8)) == "link"
    assert resource_of(Group(16, 8, 2)) == "network"
