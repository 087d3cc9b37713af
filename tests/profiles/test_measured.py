"""Profiles of machines as files and as clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from galv.errors import ClusterError
from galv.profiles.cluster import load_cluster
from galv.profiles.measured import read_measured
from galv.profiles.readings import UnitReading
from tests.made_up_profile import made_up_profile


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A profile's file."""
    place = tmp_path / "made-up.json"
    place.write_text(made_up_profile(unsteady=0.3).to_json())
    return str(place)


def test_a_profile_survives_its_file(path: str) -> None:
    """What is read is what was written."""
    assert read_measured(path) == made_up_profile(unsteady=0.3)


def test_a_profile_is_a_cluster(path: str) -> None:
    """The path stands for all that was measured, with a shape for a part of it."""
    whole, part = load_cluster(path), load_cluster(f"{path}:1x1")

    assert (whole.num_devices, part.num_devices) == (2, 1)
    assert whole.device.launch_seconds == pytest.approx(2 * part.device.launch_seconds)
    assert whole.intra_node.measured is not None
    assert any("made up" in note and "2026-11-30" in note for note in whole.notes)
    assert any("unsteady" in note for note in whole.notes)


def test_what_was_not_measured_is_said(path: str) -> None:
    """More devices than were measured are priced as the most that were, and the plan says so."""
    cluster = load_cluster(f"{path}:4x2")

    assert cluster.num_devices == 8
    assert any("4 devices on 2 nodes are priced as 2 on 1" in note for note in cluster.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the profile"),
        ("{", "is no profile of galv's"),
        ('{"schema_version": 2}', "schema_version"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    """The message names the file and what is wrong with it."""
    place = tmp_path / "wrong.json"
    if text is not None:
        place.write_text(text)

    with pytest.raises(ClusterError, match=message):
        load_cluster(f"{place}:2x1")


def test_no_device_is_no_cluster(path: str) -> None:
    """A shape with a zero is refused."""
    with pytest.raises(ClusterError, match="1 to"):
        load_cluster(f"{path}:0x1")


def test_units_are_kept_by_what_they_are_of() -> None:
    """A unit that is timed anew replaces its reading; others stay, in every other setting too."""

    def reading(seconds: float, samples: int = 1) -> UnitReading:
        return UnitReading(unit="ab", dtype="fp32", phase="forward", samples=samples, seconds=seconds, spread=0.0)

    profile = made_up_profile().with_units(2, (reading(1.0), reading(2.0, 4))).with_units(2, (reading(3.0),))
    one, two = (setting.device.measured for setting in profile.settings)

    assert one is not None
    assert two is not None
    assert one.units == ()
    assert {(unit.samples, unit.seconds) for unit in two.units} == {(1, 3.0), (4, 2.0)}
