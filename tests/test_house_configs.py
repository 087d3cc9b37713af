"""The example configurations are what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from galv.profiles.cluster import load_cluster
from galv.runtime.train_config import read_train_config

CONFIGS = Path(__file__).parents[1] / "configs"

PUBLISHED_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("models/*.json")), ids=lambda path: path.stem)
def test_model_configs_have_their_published_size(path: Path) -> None:
    """A model has as many parameters as its makers counted; the tiny ones fit on any machine."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    if path.stem.endswith("-tiny"):
        assert num_parameters < 10_000_000
    else:
        assert num_parameters == PUBLISHED_PARAMETERS[path.stem]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("clusters/*.yaml")), ids=lambda path: path.stem)
def test_cluster_files_can_be_read(path: Path) -> None:
    """Every cluster file describes nodes of several devices."""
    cluster = load_cluster(str(path))

    assert cluster.num_devices == cluster.devices_per_node * cluster.num_nodes > 1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("train/*.yaml")), ids=lambda path: path.stem)
def test_training_configurations_can_be_read(path: Path) -> None:
    """Every one says how many steps."""
    assert read_train_config(path).steps >= 1
