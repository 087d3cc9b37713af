"""Tiny models and hand-made plans for them, for tests of what a plan means to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from galv.planner.plan import (
    Cluster,
    Estimate,
    ExpertLayout,
    InputSpec,
    MemoryBreakdown,
    Model,
    Pipeline,
    Plan,
    ScheduleName,
    Stage,
    StageEstimate,
    Strategy,
    TensorParallelLayout,
    TimeBreakdown,
    Training,
    Unit,
    UnitEstimate,
)

VOCABULARY = 64
SEQ_LEN = 16
ONE_DEVICE = Strategy()
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "use_cache": False,
}


def tiny_llama(num_blocks: int = 3, *, tied: bool = False) -> nn.Module:
    """A Llama small enough for many processes, with weights of seed 0."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SMALL, num_hidden_layers=num_blocks, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).train()


def tiny_gpt2(num_blocks: int = 3) -> nn.Module:
    """A GPT-2 without dropout, its embedding and head tied, with weights of seed 0."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQ_LEN,
        n_embd=32,
        n_head=4,
        n_layer=num_blocks,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train()


def tiny_mixtral(num_blocks: int = 2, **changes: Any) -> nn.Module:
    """A Mixtral of four experts, two for each token, with weights of seed 0."""
    torch.manual_seed(0)
    sizes = _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": num_blocks} | changes
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama,
    "llama-tied": lambda: tiny_llama(tied=True),
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
    "llama-deep": lambda: tiny_llama(5),
}


def unit_modules(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """The units of a tiny model: (class, modules) of embedding, blocks and head, in order."""
    if isinstance(model, transformers.GPT2LMHeadModel):
        embedding, blocks, head = (
            ("transformer.wte", "transformer.wpe"),
            "transformer.h",
            ("transformer.ln_f", "lm_head"),
        )
    else:
        embedding, blocks, head = ("model.embed_tokens",), "model.layers", ("model.norm", "lm_head")
    names = [name for name, _ in model.get_submodule(blocks).named_children()]
    return [("embedding", embedding), *(("block", (f"{blocks}.{name}",)) for name in names), ("head", head)]


def leaves(model: nn.Module) -> list[str]:
    """Every module that a unit of the tiny model owns."""
    return [module for _, modules in unit_modules(model) for module in modules]


def hand_made_plan(
    model: nn.Module,
    strategies: Strategy | Sequence[Strategy] = ONE_DEVICE,
    *,
    stages: Sequence[int] | None = None,
    schedule: ScheduleName = "none",
    num_microbatches: int = 1,
    global_batch: int = 8,
    layouts: Sequence[TensorParallelLayout] = (),
    experts: Sequence[ExpertLayout] = (),
    virtual_stages: int = 1,
) -> Plan:
    """A plan for a tiny model, priced at almost nothing; `stages` are the numbers of units of each pipeline stage.

    A pipeline rank holds `virtual_stages` of them.

    What stands around the blocks never recomputes.
    """
    modules = unit_modules(model)
    each = [strategies] * len(modules) if isinstance(strategies, Strategy) else list(strategies)
    units = []
    for (kind, names), strategy in zip(modules, each, strict=True):
        name = f"{kind}{len(units)}" if kind == "block" else kind
        own = strategy if kind == "block" else strategy.model_copy(update={"recompute": "none"})
        units.append(Unit(name=name, unit_class=kind, modules=names, strategy=own))
    sizes = [len(units)] if stages is None else list(stages)
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    pipeline = Pipeline(degree=len(sizes) // virtual_stages, schedule=schedule, virtual_stages=virtual_stages)
    shape = (2, SEQ_LEN)
    inputs = tuple(
        InputSpec(name=name, shape=shape, dtype="int64", batch_dim=0, high=VOCABULARY)
        for name in ("input_ids", "labels")
    )
    return Plan(
        galv_version="test",
        model=Model(
            name=type(model).__name__,
            source=None,
            num_parameters=sum(p.numel() for p in model.parameters()),
            num_samples=2,
            inputs=inputs,
            tied=tied_groups(model),
            fingerprint="test",
        ),
        cluster=Cluster(
            spec="cpu:test",
            device="cpu",
            kind="cpu",
            devices_per_node=each[0].num_devices * len(sizes) // virtual_stages,
            num_nodes=1,
            memory_budget_bytes=2**33,
        ),
        training=Training(
            seq_len=SEQ_LEN,
            global_batch=global_batch,
            num_microbatches=num_microbatches,
            precision="fp32",
            optimizer="sgd",
        ),
        pipeline=pipeline,
        stages=tuple(Stage(units=tuple(units[a:b])) for a, b in pairwise(cuts)),
        layouts=tuple(layouts),
        experts=tuple(experts),
        estimate=almost_nothing([sum(sizes[i] for i in pipeline.stages_of_rank(r)) for r in range(pipeline.degree)]),
    )


def almost_nothing(sizes: Sequence[int]) -> Estimate:
    """An estimate of a microsecond and a byte for each unit of stages of those sizes."""
    cost = UnitEstimate(compute_seconds=1e-6, communication_seconds=0.0, state_bytes=1, activations_bytes=0)
    stages = tuple(
        StageEstimate(
            time=TimeBreakdown(compute_seconds=1e-6 * size),
            memory=MemoryBreakdown(parameters_bytes=size),
            units=(cost,) * size,
        )
        for size in sizes
    )
    return Estimate(
        step_seconds=1e-6 * max(sizes),
        tokens_per_second=1.0,
        mfu=0.0,
        model_flops=1.0,
        peak_bytes=tuple(sizes),
        fits=True,
        breakdown=TimeBreakdown(compute_seconds=1e-6 * max(sizes)),
        stages=stages,
    )


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of parameter names that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def random_batch(num_samples: int, seed: int) -> dict[str, Tensor]:
    """Tokens and labels; the samples have very different numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num_samples, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    for sample in range(num_samples):
        ignored = int(torch.randint(0, SEQ_LEN, (), generator=generator)) if sample else SEQ_LEN
        labels[sample, :ignored] = -100
    return {"input_ids": tokens, "labels": labels}
