"""`galv profile`, `galv calibrate` and `galv devices` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from galv.cli import profile_ranks
from galv.errors import UsageError
from galv.profiles.measured import read_measured
from tests.cli.conftest import Galv
from tests.made_up_profile import made_up_profile
from tests.profiles.measure.test_measure import TINY
from tests.profiles.test_calibration import record_of


def test_a_machine_is_measured(tmp_path: Path, run_galv: Galv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is written, spoken of, and a cluster to plan for; nothing else is left beside it."""
    monkeypatch.setattr("galv.profiles.measure.machine.sizes_of", lambda kind, quick: TINY)
    path = tmp_path / "here.json"
    result = run_galv("profile", "-o", path, "--quick", "--devices", "cpu", "--minutes", "0.2")

    assert result.status == 0, result.err
    assert f"--cluster {path}:1x1" in result.out
    assert read_measured(str(path)).settings[0].processes == 1
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]


@pytest.mark.parametrize(
    ("devices", "nproc", "environment", "message"),
    [
        ("tpu", None, {}, "--devices is cpu, cuda"),
        ("cuda:77", None, {}, "has"),
        ("cpu", 2, {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started them"),
    ],
)
def test_devices_that_are_not_there(devices: str, nproc: int | None, environment: dict[str, str], message: str) -> None:
    """A wrong choice of devices is refused in words."""
    with pytest.raises(UsageError, match=message):
        profile_ranks.chosen_devices(devices, nproc, environment)


def test_a_plan_says_what_it_rests_on(tmp_path: Path, run_galv: Galv) -> None:
    """A plan priced by a measured profile names it and carries its uncertainty."""
    path = tmp_path / "made-up.json"
    path.write_text(made_up_profile().to_json())
    model = "configs/models/gpt2-tiny.json"
    result = run_galv("estimate", model, "--cluster", f"{path}:2x1", "--seq-len", "64", "--global-batch", "4")
    as_json = run_galv(
        "estimate", model, "--cluster", f"{path}:2x1", "--seq-len", "64", "--global-batch", "4", "--json"
    )

    assert "+-5 %" in result.out
    assert "note: priced by the profile made-up, measured on made up with torch 2.13.0" in result.out
    assert json.loads(as_json.out)["estimate"]["uncertainty"] == pytest.approx(0.05)


def test_a_run_corrects_a_profile(tmp_path: Path, run_galv: Galv) -> None:
    """The terms are shown beside the run's, and the corrected profile is written."""
    profile, run, output = (tmp_path / name for name in ("made-up.json", "run.json", "better.json"))
    profile.write_text(made_up_profile().to_json())
    run.write_text(record_of(2.0).model_dump_json())
    result = run_galv("calibrate", run, "--profile", profile, "-o", output)

    assert result.status == 0, result.err
    assert "most off: compute" in result.out
    assert len(read_measured(str(output)).corrections) == 4

    refused = run_galv("calibrate", profile, "-o", output)
    assert refused.status == 2
    assert "is no record of a run" in refused.err


def test_devices_are_listed_with_their_sources(run_galv: Galv) -> None:
    """The library and this machine; one device with the source of every figure."""
    every, one, wrong = run_galv("devices"), run_galv("devices", "cpu"), run_galv("devices", "h1000")

    assert "h100-sxm-80" in every.out
    assert "\nhere: " in every.out
    assert "measured on a 2-core x86-64 cloud VM" in one.out
    assert wrong.status == 2
    assert "cpu" in json.loads(run_galv("devices", "--json").out)["devices"]
