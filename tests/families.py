"""The model families that galv promises to capture: small ones with values, and how to get their graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from galv.planner.capture import capture, huggingface
from galv.planner.capture.source import ModelSource, resolve_model
from galv.planner.graph import ModelGraph
from galv.planner.plan import (
    Cluster,
    Model,
    Pipeline,
    Plan,
    Precision,
    Stage,
    Strategy,
    Training,
    Unit,
)
from tests.models import others, sequences
from tests.plans import almost_nothing

SEQ_LEN = 32
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS: dict[str, tuple[dict[str, Any], int | None]] = {
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 96,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        SEQ_LEN,
    ),
    "llama": ({"model_type": "llama", **_TEXT}, SEQ_LEN),
    "qwen3": ({"model_type": "qwen3", "head_dim": 8, **_TEXT}, SEQ_LEN),
    "gemma": ({"model_type": "gemma", "head_dim": 8, **_TEXT}, SEQ_LEN),
    "gemma2": ({"model_type": "gemma2", "head_dim": 8, "sliding_window": 16, **_TEXT}, SEQ_LEN),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, **_TEXT}, SEQ_LEN),
    "qwen3-moe": ({"model_type": "qwen3_moe", "head_dim": 8, **_TEXT, **_EXPERTS}, SEQ_LEN),
    "bert": ({"model_type": "bert", **_TEXT}, SEQ_LEN),
    "t5": (
        {
            "model_type": "t5",
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        SEQ_LEN,
    ),
    "vit": ({"model_type": "vit", **_VISION}, None),
    "swin": (
        {
            "model_type": "swin",
            "image_size": 64,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 4, 2],
            "num_heads": [2, 2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        None,
    ),
    "clip": (
        {
            "model_type": "clip",
            "projection_dim": 32,
            "text_config": _TEXT | {"max_position_embeddings": SEQ_LEN},
            "vision_config": _VISION,
        },
        None,
    ),
    "whisper": (
        {
            "model_type": "whisper",
            "vocab_size": 96,
            "d_model": 32,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        None,
    ),
    "resnet": (
        {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [2, 3, 4, 2],
            "num_labels": 10,
        },
        None,
    ),
}
"""Configurations of transformers models, with the tokens of a sample."""


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(8))


def _tokens(n: int) -> dict[str, Tensor]:
    return {"tokens": _integers(64, n, 16)}


@dataclass(frozen=True)
class Plain:
    """A model written for the tests."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]


PLAIN: dict[str, Plain] = {
    "lstm": Plain(sequences.LSTMLanguageModel, _tokens),
    "tdnn": Plain(sequences.TDNN, lambda n: {"sound": _floats(n, 8, 40), "target": _floats(n, 4)}),
    "tied": Plain(sequences.Decoder, _tokens),
    "lora": Plain(sequences.lora_decoder, _tokens),
    "dlrm": Plain(
        lambda: others.DLRM(width=128),  # so wide that the bookkeeping of a table, which differs by device, is small
        lambda n: {
            "numbers": _floats(n, 8),
            "categories": _integers(100, n, 4, 3),
            "clicked": _integers(2, n).float(),
        },
    ),
    "graph-net": Plain(
        others.GraphNet,
        lambda n: {
            "features": _floats(10 * n, 8),
            "sources": _integers(10 * n, 30 * n),
            "targets": _integers(10 * n, 30 * n),
            "classes": _integers(5, 10 * n),
        },
    ),
    "unet": Plain(others.UNet, lambda n: {"image": _floats(n, 3, 16, 16), "target": _floats(n, 3, 16, 16)}),
    "space-time": Plain(
        others.SpaceTimeDiffusion,
        lambda n: {"film": _floats(n, 3, 4, 8, 8), "noise": _floats(n, 3, 4, 8, 8), "step": _floats(n).sigmoid()},
    ),
    "gan": Plain(others.Adversaries, lambda n: {"noise": _floats(n, 8, 1, 1), "image": _floats(n, 3, 16, 16)}),
    "low-rank": Plain(others.LowRankPerceptron, lambda n: {"x": _floats(n, 32), "classes": _integers(5, n)}),
    "mixed": Plain(
        others.Mixed,
        lambda n: {
            "kind": _integers(10, n, 4),
            "numbers": _floats(n, 6),
            "mask": _floats(n, 4).sigmoid(),
            "labels": _integers(3, n),
        },
    ),
}
FAMILIES = (*CONFIGS, *PLAIN)


def source_of(name: str, folder: Path) -> ModelSource:
    """Where galv gets the model of a family from; configurations are written to `folder`."""
    if name in PLAIN:
        return resolve_model(PLAIN[name].build, PLAIN[name].inputs)
    path = folder / f"{name}.json"
    config, seq_len = CONFIGS[name]
    path.write_text(json.dumps(config), encoding="utf-8")
    return resolve_model(str(path), seq_len=seq_len)


def graph_of(name: str, folder: Path, precision: Precision = "fp32", **wishes: Any) -> ModelGraph:
    """The graph of a family, as a CPU runs it."""
    return capture(source_of(name, folder), precision=precision, device_kind="cpu", **wishes)


def real_model(name: str, folder: Path) -> nn.Module:
    """The model of a family with weights, in training mode on the CPU."""
    torch.manual_seed(0)
    if name in PLAIN:
        return PLAIN[name].build().train()
    source_of(name, folder)
    config = huggingface.config_from_file(folder / f"{name}.json")
    return huggingface.builder(config, device="cpu")()


def real_batch(name: str, folder: Path, num_samples: int) -> dict[str, Tensor]:
    """Inputs with values for the model of a family."""
    source = source_of(name, folder)
    if name in PLAIN:
        return source.example(num_samples)
    example = source.example(num_samples)
    return {
        key: _floats(*value.shape) if value.is_floating_point() else _integers(source.limits[key], *value.shape)
        for key, value in example.items()
    }


def pipelined(graph: ModelGraph, cuts: tuple[int, ...], num_samples: int) -> Plan:
    """A plan that runs the units of `graph` in stages that begin at the units `cuts` and at the first one."""
    units = [
        Unit(name=u.name, unit_class=u.unit_class, modules=u.modules, strategy=Strategy(), parameters=u.parameters)
        for u in graph.units
    ]
    borders = (0, *cuts, len(units))
    stages = tuple(Stage(units=tuple(units[a:b])) for a, b in pairwise(borders))
    return Plan(
        galv_version="test",
        model=Model(
            name=graph.name,
            source=None,
            num_parameters=graph.num_parameters,
            num_samples=graph.num_samples,
            inputs=graph.inputs,
            tied=graph.tied,
            fingerprint=graph.fingerprint,
        ),
        cluster=Cluster(
            spec="cpu", device="cpu", kind="cpu", devices_per_node=len(stages), num_nodes=1, memory_budget_bytes=2**33
        ),
        training=Training(
            seq_len=None, global_batch=num_samples, num_microbatches=1, precision="fp32", optimizer="sgd"
        ),
        pipeline=Pipeline(degree=len(stages), schedule="gpipe" if cuts else "none"),
        stages=stages,
        estimate=almost_nothing([len(stage.units) for stage in stages]),
    )
