"""What the search arrives at by itself where the field knows the answer. Nothing here is a rule of the planner."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
import transformers

from galv.cost_models.unit import Degrees, FactsPricer
from galv.errors import NoFeasiblePlan
from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph
from galv.planner.plan import Strategy
from galv.planner.planner import Answer, best_plan
from galv.planner.space import Candidate, Features, Request, candidates
from galv.planner.tables import Limits
from galv.profiles.cluster import load_cluster
from tests.planner.decoder import decoder

GIB = 2**30


def request(global_batch: int, seq_len: int, gib: float) -> Request:
    return Request(
        global_batch=global_batch, seq_len=seq_len, precision="bf16", optimizer="adamw", budget_bytes=int(gib * GIB)
    )


@functools.cache
def llama(layers: int, hidden: int, intermediate: int, heads: int, seq_len: int) -> ModelGraph:
    """A Llama of those sizes, captured from Hugging Face's code."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=seq_len,
        use_cache=False,
    )

    def batch(samples: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(samples, seq_len, dtype=torch.int64, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    def model() -> torch.nn.Module:
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config)

    return capture(resolve_model(model, batch), precision="bf16", device_kind="cuda")


def best(
    graph: ModelGraph,
    spec: str,
    wanted: Request,
    features: Features,
    keep: Callable[[Candidate], bool] = bool,
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> Answer:
    shared = FactsPricer(graph, load_cluster(spec))
    found = [one for one in candidates(graph, shared.cluster, wanted, features) if keep(one)]
    return best_plan(shared, found, wanted.budget_bytes, limits=limits)


def strategies(answer: Answer) -> Counter[Strategy]:
    """What the blocks do."""
    ends = {answer.priced.table.chain[0], answer.priced.table.chain[-1]}
    return Counter(
        option.strategy for stage in answer.solution.stages for name, option in stage.units() if name not in ends
    )


def test_llama_13b_needs_neither_checkpointing_nor_large_microbatches() -> None:
    """On 64 A100 with fused attention and ZeRO 1: microbatch 1, nothing recomputed, norms sharded over the sequence
    where tensors are.

    Found by hand in a sweep over layouts of that kind (Hagemann et al., arXiv 2311.05610).
    """
    graph, wanted = llama(40, 5120, 13824, 40, 2048), request(2048, 2048, 79.0)
    answer = best(graph, "a100-sxm-80:8x8", wanted, Features(), limits=Limits(zero=1))
    found = strategies(answer)

    uniform = answer.priced.candidate.uniform
    assert uniform is not None
    assert answer.priced.candidate.outer.microbatch(answer.priced.candidate.num_devices // uniform.num_ranks) == 1
    assert {strategy.recompute for strategy in found} == {"none"}
    assert all(strategy.sequence == "megatron" for strategy in found if strategy.tp > 1)


def test_little_memory_makes_some_layers_recompute() -> None:
    """Of a Llama-2-7B on eight devices of 36 GiB some layers recompute and others do not."""
    graph, wanted = llama(32, 4096, 11008, 32, 2048), request(64, 2048, 36.0)
    answer = best(graph, "a100-sxm-80:8x1", wanted, Features(), lambda one: one.outer.pp == 1)
    levels = {strategy.recompute for strategy in strategies(answer)}

    assert len(levels) > 1


def test_plain_data_parallelism_where_it_fits_and_is_fastest() -> None:
    """In fp32 a model whose update takes no time gets DistributedDataParallel: nothing sharded, cut or recomputed."""
    wanted = replace(request(32, 1024, 79.0), precision="fp32")
    answer = best(decoder(hidden=256), "h100-sxm-80:8x1", wanted, Features())

    assert set(strategies(answer)) == {Strategy(dp_replicate=8)}


def test_parameters_are_gathered_once_a_step_where_memory_allows() -> None:
    """Data parallelism that has to shard keeps its parameters whole if it can, and shards them too if it must."""
    graph = decoder(num_layers=16)

    def levels(gib: float) -> set[int]:
        answer = best(graph, "h100-sxm-80:8x1", request(64, 1024, gib), Features(), data_only)
        return {strategy.zero for strategy in strategies(answer)}

    least = next(gib for gib in range(1, 80) if _fits(graph, gib))
    assert levels(79.0) <= {0, 1, 2}
    assert 3 in levels(least)


def data_only(candidate: Candidate) -> bool:
    return candidate.outer.pp == 1 and candidate.uniform == Degrees()


def _fits(graph: ModelGraph, gib: float) -> bool:
    try:
        best(graph, "h100-sxm-80:8x1", request(64, 1024, gib), Features(), data_only)
    except NoFeasiblePlan:
        return False
    return True


def test_deep_pipelines_are_interleaved() -> None:
    """With few microbatches for many stages, several chunks a rank shorten the bubble more than they cost."""
    graph, features = decoder(num_layers=64), Features(interleaved=True)
    answer = best(graph, "h100-sxm-80:8x1", request(8, 1024, 79.0), features, lambda one: one.outer.pp == 8)

    assert answer.priced.candidate.outer.schedule == "interleaved"


def test_thirty_layers_over_eight_stages() -> None:
    """No stage has more than one layer beyond another, ends not counted."""
    answer = best(
        decoder(num_layers=30), "h100-sxm-80:8x1", request(64, 1024, 79.0), Features(), lambda one: one.outer.pp == 8
    )
    cut = [0, *(place - 1 for place in answer.solution.cut[1:-1]), 30]

    assert max(b - a for a, b in pairwise(cut)) <= 4
