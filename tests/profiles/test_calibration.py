"""A training run corrects a profile, and says which term was off."""

from __future__ import annotations

import pytest

from galv.cost_models.compute import optimizer_seconds
from galv.profiles.calibration import calibrated, corrections, profile_of, told
from galv.profiles.cluster import load_cluster, measured_cluster
from galv.profiles.run_record import RunRecord, StagePrediction, StageRecord
from tests.made_up_profile import made_up_profile


def record_of(busy: float, update: float = 0.1, peak: int = 2**30) -> RunRecord:
    """A run of one stage that was predicted to compute for 0.9 s and to show 0.1 s of communication."""
    return RunRecord(
        record_version=1,
        model="m",
        cluster="made-up.json",
        devices_per_node=2,
        num_nodes=1,
        steps=5,
        step_seconds=busy + update,
        step_spread=0.0,
        predicted_step_seconds=1.1,
        stages=(StageRecord(busy_seconds=busy, optimizer_seconds=update, peak_bytes=peak),),
        predicted=(StagePrediction(busy_seconds=1.0, optimizer_seconds=0.1, peak_bytes=2**30, compute_seconds=0.9),),
    )


def test_a_run_as_predicted_changes_nothing() -> None:
    """The profile stays, with a word that it was checked."""
    profile, record = made_up_profile(), record_of(1.0)
    found = calibrated(profile, record, "run.json")

    assert told(corrections(record, "run.json")) is None
    assert found.settings[1].device.measured is not None
    assert found.settings[1].device.measured.compute_scale == pytest.approx(1.0)
    assert any("corrected by 1 training runs" in note for note in found.notes(2, 1))


def test_the_term_that_was_off_is_named_and_corrected() -> None:
    """A step that computes twice as long is the computation's fault, mostly; the setting of the run alone changes."""
    profile, record = made_up_profile(), record_of(2.0)
    found = calibrated(profile, record, "run.json")
    before, after = profile.settings[1].device.measured, found.settings[1].device.measured

    assert told(corrections(record, "run.json")) == "compute"
    assert before is not None
    assert after is not None
    explained = 0.9 * after.compute_scale + 0.1 * found.settings[1].intra_node.measured.scale  # type: ignore[union-attr]
    assert explained == pytest.approx(2.0)
    assert found.settings[0] == profile.settings[0]


def test_updates_and_memory_are_corrected_by_themselves() -> None:
    """An update that takes three times as long is priced so; bytes beyond the estimate are the process's own."""
    profile = made_up_profile()
    found = calibrated(profile, record_of(1.0, update=0.3, peak=2**30 + 2**20), "run.json")
    devices = [measured_cluster(p, "made-up", 2, 1).device for p in (profile, found)]
    seconds = [optimizer_seconds(1e6, "adamw", "fp32", device) for device in devices]

    assert told(corrections(record_of(1.0, update=0.3), "run.json")) == "optimizer"
    assert seconds[1] == pytest.approx(3 * seconds[0])
    assert devices[1].context_bytes - devices[0].context_bytes == 2**20


def test_a_shipped_device_can_be_corrected() -> None:
    """A run that was planned for a shipped device gives a profile of it."""
    profile = profile_of(load_cluster("cpu:2x1"), torch="2.13.0", date="today")
    found = calibrated(profile, record_of(2.0), "run.json")

    assert found.settings[0].device.measured is not None
    assert found.settings[0].device.measured.compute_scale > 1.5
    assert type(found).model_validate_json(found.to_json()) == found
