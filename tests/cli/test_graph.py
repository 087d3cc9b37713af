"""`galv graph` shows a model's units as a table, as JSON and for Graphviz."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import galv
from tests.cli.conftest import Galv
from tests.families import CONFIGS


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    """A small encoder-decoder."""
    path = tmp_path / "t5.json"
    path.write_text(json.dumps(CONFIGS["t5"][0]), encoding="utf-8")
    return path


def test_the_table_has_every_class_the_chain_and_the_edges(run_galv: Galv, t5: Path, tmp_path: Path) -> None:
    """Classes with their counts, the order of units, what is carried further, and a file for Graphviz."""
    result = run_galv("graph", t5, "--seq-len", 32, "--micro-batch", 2, "--dot", tmp_path / "t5.dot")
    assert result.status == 0
    assert "2 samples of 32 tokens, bf16" in result.out
    for words in ("T5Block.4", "bridge 1", "Chain: embedding → encoder.block.0", "bridge 1 → decoder.block.0-2"):
        assert words in result.out
    dot = (tmp_path / "t5.dot").read_text(encoding="utf-8")
    assert dot.startswith('digraph "t5"') and '"bridge 1" -> "decoder.block.2"' in dot


def test_json_is_one_object_with_totals(run_galv: Galv, t5: Path) -> None:
    """The JSON has classes, chain, edges and totals that are the sums of the classes."""
    data = json.loads(run_galv("graph", t5, "--seq-len", 32, "--json").out)
    assert data["totals"]["forward_flops"] == sum(row["count"] * row["forward_flops"] for row in data["classes"])
    assert [unit["unit"] for unit in data["chain"]][:2] == ["embedding", "encoder.block.0"]
    assert data["edges"] and data["no_pipeline"] is None


def test_units_can_be_asked_for(run_galv: Galv, t5: Path) -> None:
    """`--units` decides what the blocks are."""
    out = run_galv("graph", t5, "--seq-len", 32, "--units", "decoder.block.*").out
    assert "Chain: embedding → decoder.block.0 → decoder.block.1-2 → head" in out


def test_bad_requests_are_refused(run_galv: Galv, t5: Path) -> None:
    """A pattern that matches nothing, or a missing sequence length, is one message and status 2."""
    wrong = run_galv("graph", t5, "--seq-len", 32, "--opaque", "nothing.*")
    assert (wrong.status, wrong.out) == (2, "") and "'nothing.*' matches no module" in wrong.err
    assert "needs a sequence length" in run_galv("graph", t5).err


def test_the_python_function_gives_the_same(t5: Path) -> None:
    """`galv.graph` returns what the command prints."""
    found = galv.graph(str(t5), seq_len=32, micro_batch=2)
    assert found.forward_flops == sum(row.count * row.forward_flops for row in found.classes)
    assert "bridge 1" in str(found)
