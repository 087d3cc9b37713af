"""Weights go to a folder that Hugging Face reads, and come back shard by shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import galv
from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.runtime.weights import open_weights, save_weights
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, random_batch


def plan_of(model: str, **sizes: object) -> Plan:
    return galv.estimate(
        MODELS[model](),
        random_batch(2, 0),
        cluster="cpu:2x1",
        seq_len=SEQ_LEN,
        global_batch=4,
        precision="fp32",
        **sizes,  # type: ignore[arg-type]  # each is a keyword of estimate
    )


def through_a_folder(model: str, text: str, folder: str, max_shard_bytes: int) -> dict[str, Tensor]:
    """Saves the weights of a run and starts another from them; what that one has."""
    plan = Plan.from_json(text)
    save_weights(galv.parallelize(MODELS[model](), plan), folder, max_shard_bytes=max_shard_bytes)
    with torch.device("meta"):
        meta = MODELS[model]()
    return galv.parallelize(meta, plan, seed=5, weights=open_weights(folder)).full_state_dict()


@pytest.mark.parametrize(("model", "sizes"), [("llama", {"tp": 2}), ("gpt2", {"zero": 3}), ("gpt2", {"pp": 2})])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_a_round_trip_changes_nothing(
    pool: Pool, tmp_path: Path, model: str, sizes: dict[str, object], max_shard_bytes: int
) -> None:
    """In one file or many, tied weights once."""
    text = plan_of(model, **sizes).to_json()
    found = pool.run(through_a_folder, 2, model, text, str(tmp_path), max_shard_bytes)[0]

    expected = MODELS[model]().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert not list(tmp_path.glob("*.partial"))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes == 20_000)
    stored = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert ("lm_head.weight" in stored) == (model == "llama")


def test_names_with_or_without_the_models_prefix(tmp_path: Path) -> None:
    """A checkpoint of the bare model serves the model with a head, and the other way round."""
    save_file({"h.0.weight": torch.ones(2), "transformer.h.1.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    read = open_weights(tmp_path)

    assert [read(name) is not None for name in ("transformer.h.0.weight", "h.1.weight", "h.2.weight")] == [
        True,
        True,
        False,
    ]


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """It is named, with what would be read."""
    with pytest.raises(UsageError, match=r"holds no weights: there is no model\.safetensors"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(UsageError, match="cannot read the weights"):
        open_weights(tmp_path)
