"""Small models of real architectures, as configuration files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SEQ_LEN = 32

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, **_COMMON},
    "gpt2": {"model_type": "gpt2", **_GPT2, **_NO_DROPOUT},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_COMMON},
    "mistral": {"model_type": "mistral", "sliding_window": 16, **_COMMON},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, **_COMMON},
    "gpt-neox": {"model_type": "gpt_neox", **_COMMON},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 0], **_COMMON},
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """Writes a configuration file, `config("llama", num_hidden_layers=8)`, and returns its path."""

    def write(name: str, **changes: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name] | changes), encoding="utf-8")
        return str(path)

    return write
