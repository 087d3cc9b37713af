"""`galv sweep`: one row for each cluster, sequence and batch; CSV, JSON and a plot of the same points."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from galv.errors import UsageError
from galv.planner.sweep import expanded
from tests.cli.conftest import Galv

MODEL = Path(__file__).parents[2] / "configs" / "models" / "llama-tiny.json"


def test_braces() -> None:
    """Lists and spans in braces multiply; nonsense is refused."""
    assert expanded("a:{1,2}x{1..3}") == ["a:1x1", "a:1x2", "a:1x3", "a:2x1", "a:2x2", "a:2x3"]
    assert expanded("a:1x1") == ["a:1x1"]
    for text in ("a:{1,2", "a:{}", "a:{1,}", "a:1}", "a:{1..2000}"):
        with pytest.raises(UsageError):
            expanded(text)


def test_points_come_as_table_csv_and_plot(run_galv: Galv, tmp_path: Path) -> None:
    """Every combination is one point, also where nothing divides; prices follow from throughput."""
    table, picture = tmp_path / "points.csv", tmp_path / "points.png"

    result = run_galv(
        *("sweep", MODEL, "--cluster", "cpu:{1,2,3}x1", "--global-batch", "4", "--seq-len", "16,32"),
        *("--price", "2", "--csv", table, "--plot", picture),
    )

    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert result.status == 0
    assert [(row["num_devices"], row["seq_len"]) for row in rows] == [(d, s) for s in ("16", "32") for d in "123"]
    for row in rows:
        if row["num_devices"] == "3" and not row["step_seconds"]:
            assert "global batch 4" in row["layout"]
            continue
        hours = float(row["num_devices"]) * 1e9 / float(row["tokens_per_second"]) / 3600
        assert float(row["cost_per_billion"]) == pytest.approx(2 * hours)
    assert len(result.out.splitlines()) == 1 + 1 + 6 + 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json(run_galv: Galv) -> None:
    """--json gives the same as data."""
    result = run_galv(
        *("sweep", MODEL, "--cluster", "cpu:1x1 cpu:2x1", "--global-batch", "2,4", "--seq-len", "16", "--json")
    )

    points = json.loads(result.out)["points"]
    assert [(p["cluster"], p["global_batch"]) for p in points] == [
        ("cpu:1x1", 2),
        ("cpu:2x1", 2),
        ("cpu:1x1", 4),
        ("cpu:2x1", 4),
    ]
    assert all(p["step_seconds"] > 0 for p in points)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cluster", "cpu:1x1", "--global-batch", "two", "--seq-len", "16"), "--global-batch takes whole numbers"),
        (("--cluster", "cpu:1x1", "--global-batch", "2", "--seq-len", "0"), "--seq-len takes whole numbers"),
        (("--cluster", "cpu:1x{1", "--global-batch", "2", "--seq-len", "16"), "a brace is open"),
        (("--cluster", "tpu:1x1", "--global-batch", "2", "--seq-len", "16"), "tpu"),
        (("--cluster", "", "--global-batch", "2", "--seq-len", "16"), "no cluster"),
    ],
)
def test_nonsense_is_refused(run_galv: Galv, words: tuple[str, ...], says: str) -> None:
    """One message that names what was given, status 2."""
    result = run_galv("sweep", MODEL, *words)

    assert result.status == 2
    assert says in result.err
