"""A published run as a question to galv: which model, which cluster, which software, which layout.

What a row does not say and nothing can stand for makes the row unusable; the reason is kept and reported.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.device import device_names
from galv.profiles.stack import stack_names

Row = dict[str, str]

GPUS = {
    "a100-sxm-80": "a100-sxm-80",
    "a100-sxm-40": "a100-sxm-40",
    "a800-80": "a800-sxm-80",
    "h800-80": "h800-sxm-80",
    "h100-sxm-80": "h100-sxm-80",
    "gb200-186": "gb200-186",
    "l4-24": "l4",
    "a10g-24": "a10g",
    "v100-sxm2-16": "v100-sxm-16",
    "v100-sxm2-32": "v100-sxm-32",
    "rtx3090-24": "rtx-3090",
    "rtx4090-24": "rtx-4090",
    "rtxa6000-48": "rtx-a6000",
}

STACKS = {
    "nanotron": "nanotron",
    "aleph-alpha-scaling": "aleph-alpha-scaling",
    "llm-foundry": "llm-foundry",
    "megatron-core": "megatron-core",
    "megatron-lm": "megatron-lm",
    "megatron-deepspeed": "megatron-deepspeed",
    "megatron-swift": "megatron-core",
    "pai-megatron-patch": "megatron-core",
    "flagscale": "flagscale",
    "paddle": "paddle",
    "hetu-galvatron": "hetu-galvatron",
    "aceso-megatron": "megatron-lm",
    "mist": "mist",
    "deepspeed": "deepspeed",
    "hf-deepspeed": "deepspeed",
    "xtuner-deepspeed": "deepspeed",
    "swift-deepspeed": "deepspeed",
    "fms-fsdp": "torch-compiled",
    "torchtune": "torchtune",
}

MEMORY_STAGE = {"ultrascale_nanotron": "first", "megatron_core_golden": "last"}
"""Sources that print the memory of one rank: the pipeline stage that it belongs to. Others print the largest."""


class Unusable(Exception):
    """A row that cannot be priced, with the reason."""


LAUNCH_BOUND = "time is launch-bound"
"""What a row says of itself when its time is that of a tiny model in a test: good for memory only."""

MEMORY_KIND = {"flagperf": "device"}
"""What a source prints that does not say: flagperf's whole GiB are nvidia-smi's. Others print what is allocated."""


@dataclass(frozen=True)
class Case:
    """One usable row and what galv is asked about it."""

    row: Row
    model_key: tuple[tuple[str, Any], ...]
    seq_len: int
    precision: str
    cluster: ClusterProfile
    stack: str
    layout: dict[str, Any] = field(hash=False)
    """Keyword arguments of `galv.estimate`."""

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def model(self) -> str:
        return self.row["model"]

    @property
    def measured_seconds(self) -> float | None:
        """The measured step; None where there is none, or where the row says that it measures launches alone."""
        if LAUNCH_BOUND in self.assumptions:
            return None
        return float(self.row["step_seconds"]) if self.row["step_seconds"] else None

    @property
    def measured_bytes(self) -> float | None:
        """The measured peak of a run that fits."""
        if not self.row["peak_memory_gib"] or self.row["status"] != "ok":
            return None
        return float(self.row["peak_memory_gib"]) * 2**30

    @property
    def assumptions(self) -> str:
        return self.row["assumptions"]


def read_rows(folder: Path) -> list[Row]:
    """All rows of the folder's published.csv."""
    with (folder / "published.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cases(rows: Iterable[Row], count_reason: Callable[[Row, str], None]) -> list[Case]:
    """The usable rows as cases; `count_reason` hears of the others."""
    found = []
    for row in rows:
        try:
            found.append(case(row))
        except Unusable as error:  # noqa: PERF203  # each row has its own reason
            count_reason(row, str(error))
    return found


def case(row: Row) -> Case:
    """The question that `row` answers. Raises Unusable."""
    seq_len = _integer(row, "seq_len")
    return Case(
        row=row,
        model_key=model_key(row, seq_len),
        seq_len=seq_len,
        precision=_precision(row),
        cluster=_cluster(row),
        stack=stack_name(row),
        layout=_layout(row),
    )


def _integer(row: Row, name: str) -> int:
    if not row[name]:
        raise Unusable(f"{name} is not known")
    return int(float(row[name]))


def _precision(row: Row) -> str:
    name = row["precision"] or "bf16"
    if name not in ("bf16", "fp16", "fp32"):
        raise Unusable(f"precision {name}")
    return name


# ----------------------------------------------------------------------------------------------- models


def model_key(row: Row, seq_len: int) -> tuple[tuple[str, Any], ...]:
    """What tells the row's model from others, sorted pairs. Raises Unusable."""
    if row["family"] not in ("llama", "gpt", "mpt", "bert"):
        raise Unusable(f"family {row['family']}: stacks price dense decoders and BERT only")
    heads = _integer(row, "n_heads")
    figures = {
        "family": "llama" if row["gated_mlp"] == "1" else "bert" if row["family"] == "bert" else "gpt",
        "layers": _integer(row, "n_layers"),
        "hidden": _integer(row, "hidden"),
        "ffn": _integer(row, "ffn_hidden"),
        "heads": heads,
        "kv_heads": int(row["n_kv_heads"] or heads),
        "vocab": _integer(row, "vocab"),
        "tied": row["tied_embeddings"] == "1",
        "seq_len": seq_len,
    }
    return tuple(sorted(figures.items()))


def build_config(key: tuple[tuple[str, Any], ...]) -> Any:
    """The Hugging Face configuration of a model."""
    import transformers

    m = dict(key)
    common = {"vocab_size": m["vocab"], "tie_word_embeddings": m["tied"]}
    if m["family"] == "bert":
        return transformers.BertConfig(
            hidden_size=m["hidden"],
            num_hidden_layers=m["layers"],
            num_attention_heads=m["heads"],
            intermediate_size=m["ffn"],
            max_position_embeddings=m["seq_len"],
            architectures=["BertForMaskedLM"],
            **common,
        )
    if m["family"] == "gpt" and m["kv_heads"] == m["heads"]:
        return transformers.GPT2Config(
            n_embd=m["hidden"],
            n_layer=m["layers"],
            n_head=m["heads"],
            n_inner=m["ffn"],
            n_positions=m["seq_len"],
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    kind = transformers.LlamaConfig if m["family"] == "llama" else transformers.Starcoder2Config
    return kind(
        hidden_size=m["hidden"],
        num_hidden_layers=m["layers"],
        num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"],
        intermediate_size=m["ffn"],
        max_position_embeddings=m["seq_len"],
        **common,
    )


@lru_cache(maxsize=512)
def graph(key: tuple[tuple[str, Any], ...], precision: str) -> Any:
    """The captured model, once for all rows that share it.

    Capture finds blocks by their repetition, so a model of one layer is captured with two, one of them then left out.
    """
    import galv
    from galv.planner.capture.huggingface import builder

    figures = dict(key)
    single = figures["layers"] == 1
    config = build_config(tuple((figures | {"layers": 2}).items()) if single else key)
    found = galv.capture(builder(config), seq_len=figures["seq_len"], precision=precision)  # type: ignore[arg-type]
    return replace(found, units=(*found.units[:2], found.units[-1])) if single else found


# ----------------------------------------------------------------------------------------------- clusters


def device_name(gpu: str) -> str | None:
    """The device profile of a GPU's canonical name, with or without the gigabytes at its end; None where none fits."""
    chip, _, size = gpu.rpartition("-")
    guesses = (GPUS.get(gpu, gpu), chip, f"{chip}-sxm-{size}", f"{gpu}-sxm")
    return next((name for name in guesses if name in device_names()), None)


def _cluster(row: Row) -> ClusterProfile:
    name = device_name(row["gpu"] or "a100-sxm-80")
    if name is None:
        raise Unusable(f"no device profile for {row['gpu']}")
    gpus, per_node = _integer(row, "num_gpus"), _integer(row, "gpus_per_node")
    if gpus % per_node:
        raise Unusable("the devices do not fill their nodes")
    return _network(f"{name}:{per_node}x{gpus // per_node}", row["internode_gbit_per_second_per_gpu"])


@lru_cache(maxsize=1024)
def _network(spec: str, gigabits: str) -> ClusterProfile:
    cluster = load_cluster(spec)
    if not gigabits:
        return cluster
    figures = {"bytes_per_second": float(gigabits) * 1e9 / 8, "devices_per_link": 1}
    return cluster.model_copy(
        update={"spec": f"{spec}@{gigabits}", "inter_node": cluster.inter_node.model_copy(update=figures)}
    )


# ----------------------------------------------------------------------------------------------- software


def stack_name(row: Row) -> str:
    """The stack profile of the row's software, with the variant that the row names.

    Software without a profile gets that of a known one whose name it holds ("my-megatron-core" of "megatron-core"),
    else the family that the columns speak of, see `family_stack`.
    """
    framework = row["framework"].lower()
    longest = sorted((name for name in STACKS if name in framework), key=len, reverse=True)
    base = STACKS[longest[0]] if longest else family_stack(row)
    variant = _variant(row, base)
    return variant if variant in stack_names() else base


def family_stack(row: Row) -> str:
    """The stack that stands for unknown software: Megatron-like where ranks share layers or form pipelines.

    Unfused attention tells a Megatron before FlashAttention. Everything else, and whatever shards parameters beside
    tensor parallelism, is PyTorch's FSDP, compiled or not.
    """
    several = any(row[name] not in ("", "1") for name in ("tp", "pp"))
    if several and row["zero"] in ("", "0", "1"):
        return "megatron-lm" if row["attention"] == "unfused" else "megatron-core"
    return "torch-compiled" if row["compiled"] == "1" else "torch-eager"


def _variant(row: Row, base: str) -> str:
    """`base` with the version that choice set or assumptions name.

    The nanotron runs come from two versions that the source does not tell apart: those of two stages with tp 8
    and more, and pipelined ones with tp 32, have the memory of one that gathers again in backward.
    """
    text = f"{row['choice_set']} {row['assumptions']}".lower()
    if base == "aleph-alpha-scaling":
        if re.search(r"rms.kernel", text):
            return f"{base}-rms"
        if re.search(r"v1\.0|attentionv1", text):
            return f"{base}-flash1"
        return f"{base}-torch" if "-torch" in text else f"{base}-fused" if "-fused" in text else base
    if base == "nanotron":
        tp, pp = int(row["tp"] or 1), int(row["pp"] or 1)
        return f"{base}-regather" if (pp == 2 and tp >= 8) or (pp > 1 and tp > 16) else base
    if base == "llm-foundry":
        era = re.search(r"20(22-12|23-02|23-04|24-01)", text)
        return f"{base}-20{era[1]}" if era else base
    if base == "megatron-lm" and "korthikanti" in text:
        return f"{base}-2022"
    return base


# ----------------------------------------------------------------------------------------------- layouts


def _layout(row: Row) -> dict[str, Any]:
    degrees = {name: _integer(row, name) for name in ("tp", "pp", "dp", "micro_batch", "num_microbatches")}
    if int(row["ep"] or 1) > 1:
        raise Unusable("expert parallelism")
    if not row["recompute"]:
        raise Unusable("recompute is not known")
    if not row["zero"]:
        raise Unusable("zero is not known")
    cp, dp = int(row["cp"] or 1), degrees["dp"]
    if degrees["tp"] * degrees["pp"] * dp * cp != _integer(row, "num_gpus"):
        raise Unusable("the degrees do not make the number of GPUs")
    return {
        "tp": degrees["tp"],
        "pp": degrees["pp"],
        "micro_batch": degrees["micro_batch"],
        "global_batch": degrees["micro_batch"] * degrees["num_microbatches"] * dp,
        "zero": int(row["zero"]) if dp * cp > 1 else 0,
        "sequence": "megatron" if row["sequence_parallel"] == "1" and degrees["tp"] > 1 else "none",
        "recompute": row["recompute"],
        "virtual_stages": int(row["virtual_stages"] or 1),
        "cp": cp,
        "attention": "unfused" if row["attention"] == "unfused" else "fused",
    }
