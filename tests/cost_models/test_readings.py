"""Measured readings win over the curves, and what lies between them is interpolated."""

from __future__ import annotations

import pytest

from galv.cost_models.communication import collective_seconds, mesh_group
from galv.cost_models.compute import operator_seconds, product_operator
from galv.cost_models.readings import place, ratio_at, ratios
from galv.cost_models.unit import Degrees, FactsPricer, unit_key
from galv.planner.graph import Operator
from galv.profiles.cluster import ClusterProfile, measured_cluster
from galv.profiles.measured import MeasuredProfile
from galv.profiles.readings import UnitReading
from tests.made_up_profile import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    LAUNCH_SECONDS,
    LINK_BYTES_PER_SECOND,
    LINK_SECONDS,
    made_up_profile,
)
from tests.planner.decoder import decoder


def _cluster(profile: MeasuredProfile, devices: int = 1) -> ClusterProfile:
    return measured_cluster(profile, "made-up", devices, 1)


def test_readings_are_taken_as_they_are() -> None:
    """At a measured place the ratio is that of the reading; along one size it is linear between logarithms."""
    known = ratios([(place(1.0), 2.0, 1.0), (place(100.0), 8.0, 1.0)])

    assert ratio_at(known, place(1.0)) == pytest.approx(2.0)
    assert ratio_at(known, place(10.0)) == pytest.approx(4.0)
    assert ratio_at(known, place(1e9)) == pytest.approx(8.0)
    assert ratio_at((), place(3.0)) == 1.0


def test_a_measured_product_costs_what_it_took() -> None:
    """At a shape of the grid exactly, within a fifth between shapes."""
    device = _cluster(made_up_profile()).device

    for shape, tolerance in (((1.0, 1024.0, 64.0, 1024.0), 1e-6), ((1.0, 512.0, 300.0, 700.0), 0.2)):
        batch, m, n, k = shape
        real = LAUNCH_SECONDS + 2 * batch * m * n * k / FLOPS_PER_SECOND
        assert operator_seconds(product_operator(shape, "fp32"), device) == pytest.approx(real, rel=tolerance)


def test_a_measured_copy_costs_what_it_took() -> None:
    """Element-wise operators are priced by the readings of their bytes."""
    device = _cluster(made_up_profile()).device
    operator = Operator("add", "memory", "forward", "", "float32", bytes_read=2**16, bytes_written=0)

    assert operator_seconds(operator, device) == pytest.approx(LAUNCH_SECONDS + 2**16 / BYTES_PER_SECOND, rel=1e-6)


def test_a_measured_collective_costs_what_it_took() -> None:
    """Of the size that was measured, and of others like it."""
    cluster = _cluster(made_up_profile(), 2)
    group = mesh_group(cluster, stride=1, size=2)
    real = 2 * (LINK_SECONDS + 2**20 / LINK_BYTES_PER_SECOND)

    assert collective_seconds("all_reduce", 2**20, group, cluster) == pytest.approx(real, rel=1e-6)
    assert collective_seconds("all_reduce", 2**19, group, cluster) < real


def test_a_timed_unit_wins_over_its_operators() -> None:
    """A whole unit that was timed costs its reading, at other sizes in proportion."""
    graph = decoder()
    name = "Block"
    plain = FactsPricer(graph, _cluster(made_up_profile()))
    before = plain.priced(name, Degrees(), 2)
    reading = UnitReading(
        unit=unit_key(graph, name),
        dtype="fp32",
        phase="forward",
        samples=2,
        seconds=3 * before.forward_seconds,
        spread=0.0,
    )
    timed = FactsPricer(graph, _cluster(made_up_profile().with_units(1, (reading,)))).priced(name, Degrees(), 2)

    assert timed.forward_seconds == pytest.approx(3 * before.forward_seconds)
    assert timed.backward_seconds == pytest.approx(before.backward_seconds)
