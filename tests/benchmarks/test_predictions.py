"""The benchmarks of profiles: their grids are whole, their figures right, and the GPU's script runs on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_check, predictions


def test_there_are_layouts_of_every_kind() -> None:
    """At least 24, with names of their own, on 1, 2 and 4 processes."""
    found = predictions.layouts()

    assert len({layout.key for layout in found}) == len(found) >= 24
    assert {layout.world for layout in found} == {1, 2, 4}
    names = " ".join(layout.name for layout in found)
    assert all(word in names for word in ("ddp", "zero", "tp", "pp", "tp x pp"))


def _row(name: str, predicted: float, *measured: float) -> predictions.Row:
    return predictions.Row(name, "group", predicted, 2**30, measured, (2**30,) * len(measured))


def test_the_figures_that_sum_up() -> None:
    """Median error, rank correlation and regret of three layouts, the chosen one 10 % slower than the best."""
    rows = [_row("a", 1.0, 1.1), _row("b", 1.1, 1.0), _row("c", 2.0, 2.0)]
    lines = predictions.summary(rows)

    assert predictions.regret(rows) == pytest.approx([0.1])
    assert predictions.rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert "median error of the step 9.1 %" in lines[0]
    assert all(row.key in predictions.report(rows) for row in rows)


def test_the_gpu_script_has_its_grid() -> None:
    """With and without recomputation and offload, on either device."""
    for device in ("cuda", "cpu"):
        names = " ".join(layout.name for layout in gpu_check.grid(device))
        assert all(word in names for word in ("plain", "selective", "full", "offload activations", "offload optimizer"))


def test_the_gpu_script_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It predicts, trains and tells the errors; the profile is made up, as measuring one has tests of its own."""
    import json

    from tests.made_up_profile import made_up_profile

    def galv(*words: str) -> None:
        if words[0] == "profile":
            Path(words[2]).write_text(made_up_profile().to_json())
        else:
            stage = {"busy_seconds": 0.1, "optimizer_seconds": 0.01, "peak_bytes": 2**28}
            Path(words[-1]).write_text(json.dumps({"step_seconds": 0.2, "stages": [stage]}))

    monkeypatch.setattr(gpu_check, "galv", galv)
    results = gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--layouts", "2"])

    assert [result.name for result in results] == ["plain, microbatch 1", "plain, microbatch 2"]
    assert all(result.predicted_seconds > 0 and result.measured_bytes == 2**28 for result in results)
    assert "+" in gpu_check.report(results) or "-" in gpu_check.report(results)
