"""Units of a model are timed one by one, without a distributed launch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from galv import api
from galv.cost_models.unit import unit_key
from galv.planner.capture import timing

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
}


def test_every_class_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and what stands around them, forward and backward, at each size; what is known costs nothing."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    monkeypatch.setattr(timing, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    request = timing.UnitsRequest(str(path), None, 16, "fp32", (1, 2), None, "cpu")
    found = timing.time_units(request, None, lambda *_: None)
    graph = api.capture(str(path), seq_len=16, precision="fp32", device_kind="cpu")
    keys = {unit_key(graph, name) for name in graph.classes}

    places = {(r.unit, r.phase, r.samples) for r in found}
    assert places == {(key, phase, n) for key in keys for phase in ("forward", "backward") for n in (1, 2)}
    assert all(reading.seconds > 0 for reading in found)

    def never(*_: object) -> None:
        raise AssertionError("nothing is left to time")

    assert timing.time_units(replace(request, known=found), None, never) == ()
