"""`galv check` on the command line: its table, its JSON, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from galv import api
from tests.cli.conftest import Galv

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}


@pytest.fixture
def checkable(tmp_path: Path) -> Path:
    config, path = tmp_path / "gpt2.json", tmp_path / "checkable.json"
    config.write_text(json.dumps(CONFIG | {"bos_token_id": 0, "eos_token_id": 1}), encoding="utf-8")
    api.estimate(str(config), cluster="h100-sxm-80:4x1", seq_len=16, global_batch=16, zero=2, pp=2).save(path)
    return path


def test_check_prints_one_rank_or_one_of_each_stage(run_galv: Galv, checkable: Path) -> None:
    """A table of the fullest stage by default; with --all-stages JSON of both."""
    table = run_galv("check", checkable)
    assert table.status == 0 and "collectives agree" in table.out
    found = json.loads(run_galv("check", checkable, "--all-stages", "--json").out)
    assert [(rank["rank"], rank["stage"]) for rank in found["ranks"]] == [(0, 0), (2, 1)]


@pytest.mark.parametrize(
    "arguments, message",
    [(("--rank", "4"), "ranks 0 to 3, not 4"), (("--rank", "0", "--all-stages"), "not both")],
)
def test_check_refuses_in_words(run_galv: Galv, checkable: Path, arguments: tuple[str, ...], message: str) -> None:
    """A rank that is not there, and two wishes at once."""
    result = run_galv("check", checkable, *arguments)
    assert result.status == 2 and message in result.err
