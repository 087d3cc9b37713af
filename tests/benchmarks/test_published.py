"""The accuracy benchmark on a made-up file of the published format: figures, reasons, JSON."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ROW = {
    "source": "made-up",
    "framework": "megatron-core",
    "model": "tiny",
    "family": "llama",
    "n_layers": "4",
    "hidden": "256",
    "ffn_hidden": "512",
    "gated_mlp": "1",
    "n_heads": "4",
    "n_kv_heads": "4",
    "vocab": "1000",
    "tied_embeddings": "0",
    "attention": "flash",
    "seq_len": "128",
    "gpu": "a100-sxm-80",
    "num_gpus": "8",
    "gpus_per_node": "8",
    "internode_gbit_per_second_per_gpu": "",
    "dp": "4",
    "tp": "2",
    "pp": "1",
    "virtual_stages": "1",
    "cp": "1",
    "ep": "1",
    "num_experts": "",
    "top_k": "",
    "zero": "1",
    "sequence_parallel": "1",
    "micro_batch": "1",
    "num_microbatches": "4",
    "global_batch": "16",
    "recompute": "none",
    "precision": "bf16",
    "compiled": "0",
    "step_seconds": "0.1",
    "tokens_per_second_per_gpu": "",
    "peak_memory_gib": "1.0",
    "memory_kind": "allocated",
    "status": "ok",
    "grade": "A",
    "assumptions": "",
    "choice_set": "made-up/tiny#x",
}


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """The script as a module."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six layouts, one of them out of memory, one a mixture of experts."""
    rows = [
        {
            **ROW,
            "row_id": f"made-up:L{i}",
            "tp": str(tp),
            "dp": str(8 // tp),
            "num_microbatches": str(2 * tp),
            "step_seconds": str(0.1 * tp),
        }
        for i, tp in enumerate((1, 2, 4))
    ]
    rows.append({**ROW, "row_id": "made-up:L3", "recompute": "full", "step_seconds": "0.5"})
    rows.append({**ROW, "row_id": "made-up:L4", "status": "oom", "step_seconds": "", "peak_memory_gib": ""})
    rows.append({**ROW, "row_id": "made-up:L5", "family": "moe"})
    for row in rows:
        if row["tp"] == "1":
            row["sequence_parallel"] = "0"
    with (tmp_path / "published.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def test_json_has_every_figure(published: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each source and the whole have all keys; rows that cannot be priced are not counted."""
    assert published.main(["--data", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert set(found) == {"sources", "all"}
    assert found["all"] == found["sources"]["made-up"]
    keys = "time_rows time_median time_p90 time_bias memory_rows memory_median memory_p90 spearman regret_mean"
    for key in (*keys.split(), "regret_max", "verdict_rows", "verdict_accuracy", "missed_oom"):
        assert key in found["all"]
    assert (found["all"]["time_rows"], found["all"]["verdict_rows"]) == (4, 1)
    assert found["all"]["missed_oom"] == 1.0


def test_the_report_gives_reasons(published: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report names the rows left out with the reason, and the worst rows."""
    assert published.main(["--data", str(data), "--source", "made-up"]) == 0
    text = capsys.readouterr().out

    assert "made-up: 1 rows: family moe" in text
    assert "made-up:L3" in text


def test_no_data_is_no_failure(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without data the command says what it needs and succeeds, so that all benchmarks can run anywhere."""
    monkeypatch.delenv("GALV_PUBLISHED", raising=False)

    assert published.main([]) == 0
    assert "--data" in capsys.readouterr().out


def test_ranks_share_ties(published: ModuleType) -> None:
    """Spearman's correlation is 1 for the same order, -1 for the opposite, and ties take their mean rank."""
    metrics = published.metrics
    rising = np.array([1.0, 2.0, 3.0, 4.0])

    assert metrics.spearman(rising, rising**2) == pytest.approx(1.0)
    assert metrics.spearman(rising, -rising) == pytest.approx(-1.0)
    assert metrics.spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({"framework": "my-megatron-core-fork"}, "megatron-core"),
        ({"framework": "someone's trainer"}, "megatron-core"),
        ({"framework": "someone's trainer", "attention": "unfused"}, "megatron-lm"),
        ({"framework": "someone's trainer", "tp": "1", "zero": "3", "compiled": "1"}, "torch-compiled"),
        ({"framework": "someone's trainer", "zero": "3"}, "torch-eager"),
        ({"framework": ""}, "megatron-core"),
    ],
)
def test_unknown_software_gets_the_stack_of_its_family(
    published: ModuleType, changes: dict[str, str], stack: str
) -> None:
    """A row whose software has no profile is priced as its columns suggest."""
    assert published.rows.stack_name({**ROW, **changes}) == stack


@pytest.mark.parametrize(
    ("gpu", "device"),
    [("h200-sxm-141", "h200-sxm-141"), ("l40s-48", "l40s"), ("a100-80", "a100-sxm-80"), ("tpu-v4", None)],
)
def test_gpus_are_found_by_their_names(published: ModuleType, gpu: str, device: str | None) -> None:
    """With or without the gigabytes at the end of the name, or the form."""
    assert published.rows.device_name(gpu) == device


def test_sets_full_of_suspect_times_are_told_apart(published: ModuleType) -> None:
    """Regret is also given without choice sets of which half of the rows say that their time is suspect."""

    def answer(name: str, measured: float, predicted: float, note: str) -> object:
        row = {**ROW, "choice_set": name, "step_seconds": str(measured), "assumptions": note}
        return published.Answer(published.rows.case(row), predicted, 1.0, True)

    sound = [answer("made-up/sound", t, t, "") for t in (1.0, 2.0, 3.0, 4.0)]
    other = [answer("made-up/other", t, 10 - t, published.metrics.SUSPECT) for t in (1.0, 2.0, 3.0, 4.0)]
    found = published.metrics.summary([*sound, *other], "AB")

    assert found["regret_mean"] == pytest.approx(1.5)
    assert found["regret_sound"] == 0.0
