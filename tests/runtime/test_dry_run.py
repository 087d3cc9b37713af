"""Dry runs against the estimate and against what gloo really does; every collective is counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from galv import api
from galv.errors import ModelError, RunError, UsageError
from galv.planner.plan import Plan
from galv.runtime.check_report import Check
from tests.distributed_pool import Pool

pytestmark = pytest.mark.slow

SMALL = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 250}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **SMALL, "bos_token_id": 0, "eos_token_id": 1},
    "llama": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
CONFIGS["wide"] = CONFIGS["llama"] | {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def priced(configs: Path, model: str, cluster: str, **layout: Any) -> Plan:
    return api.estimate(str(configs / f"{model}.json"), cluster=cluster, seq_len=32, **{"global_batch": 32} | layout)


LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "cpu:4x1", {"zero": 0}),
    ("gpt2", "h100-sxm-80:4x1", {"zero": 1}),
    ("llama", "h100-sxm-80:4x1", {"zero": 2}),
    ("gpt2", "h100-sxm-80:4x1", {"zero": 3, "recompute": "full"}),
    ("llama", "h100-sxm-80:4x1", {"zero": 3, "tp": 2, "recompute": "selective"}),
    ("gpt2", "h100-sxm-80:4x1", {"zero": 1, "tp": 2, "sequence": "none", "recompute": "full", "precision": "fp16"}),
    ("gpt2", "h100-sxm-80:8x1", {"zero": 2, "tp": 2, "pp": 2, "micro_batch": 2}),
    ("llama", "cpu:8x1", {"zero": 1, "tp": 2, "pp": 2, "schedule": "gpipe", "micro_batch": 2}),
]


@pytest.mark.parametrize("model, cluster, layout", LAYOUTS)
def test_every_collective_is_the_estimates_and_states_are_exact(
    configs: Path, model: str, cluster: str, layout: dict[str, Any]
) -> None:
    """Every layout, every stage: not one collective is missing, added or of another size."""
    plan = priced(configs, model, cluster, **layout)
    checked = api.check(plan, all_stages=True)
    assert [rank.stage for rank in checked.ranks] == list(range(plan.pipeline.degree))
    for rank in checked.ranks:
        differing = [term for term in rank.collectives if term.estimated_count != term.checked_count]
        assert not differing
        assert rank.collectives_agree
        assert sum(term.checked_bytes for term in rank.memory) == rank.checked_peak_bytes
        for term in rank.memory:
            if term.name == "optimizer":
                assert term.estimated_bytes == pytest.approx(term.checked_bytes, rel=0.01)


def test_a_wrong_estimate_shows(configs: Path) -> None:
    """The comparison can fail: the collectives of one ZeRO level are not those of another."""
    from galv.cost_models.collectives import step_collectives
    from galv.planner.capture.attention import fused_attention
    from galv.planner.capture.glue import glue_for
    from galv.runtime.check_report import compared
    from galv.runtime.dry_run import dry_run

    plans = {zero: priced(configs, "llama", "h100-sxm-80:4x1", zero=zero) for zero in (1, 3)}
    run = dry_run(
        lambda: api.build_model(plans[1]),
        plans[1],
        0,
        glue=lambda model, num_samples: glue_for(model, plans[1], num_samples),
        kernels=lambda: fused_attention("cuda"),
    )
    graph = api.capture(str(configs / "llama.json"), seq_len=32)
    (rank,) = compared(plans[3], [run], {0: step_collectives(plans[3], graph, 0)}).ranks
    assert not rank.collectives_agree
    assert "DIFFER" in str(Check("llama", "", (rank,)))


def count_real_calls(plan_json: str) -> Counter[tuple[str, int]]:
    """What one rank of a real gloo run calls in its second step: (kind, bytes)."""
    from galv.runtime.synthetic import synthetic_batches
    from galv.runtime.watch import Watch

    plan = Plan.from_json(plan_json)
    module = api.parallelize(api.build_model(plan), plan)
    optimizer, batches = module.optimizer(), synthetic_batches(plan)
    for _ in range(2):
        watch = Watch(answers=False)
        batch = module.shard_batch(next(batches))
        with watch:
            module.train_step(batch)
            module.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Counter((call.kind, call.num_bytes) for _, call in watch.calls)


@pytest.mark.parametrize("layout", [{"zero": 2, "tp": 2}, {"zero": 1, "pp": 2, "micro_batch": 4}])
def test_a_real_run_calls_the_same(configs: Path, pool: Pool, layout: dict[str, Any]) -> None:
    """What a dry run counts is what gloo processes call."""
    plan = priced(configs, "llama", "cpu:4x1", **layout)
    (rank,) = api.check(plan, rank=0).ranks
    expected = Counter[tuple[str, int]]()
    for term in rank.collectives:
        expected[term.kind, term.num_bytes] += term.checked_count
    assert pool.run(count_real_calls, 4, plan.to_json())[0] == expected


def real_buckets(plan_json: str) -> list[int]:
    """The bytes of the buckets that DistributedDataParallel makes in a real run."""
    from galv.runtime.synthetic import synthetic_batches

    plan = Plan.from_json(plan_json)
    module = api.parallelize(api.build_model(plan), plan)
    for _, batch in zip(range(2), synthetic_batches(plan), strict=False):
        module.train_step(module.shard_batch(batch))
    sizes = module._parts.called._ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return sorted(int(size) for size in sizes.split(","))


def test_buckets_are_those_of_a_real_run(configs: Path, pool: Pool) -> None:
    """DistributedDataParallel's buckets, in the order in which gradients become ready."""
    plan = priced(configs, "wide", "cpu:2x1", zero=0)
    (rank,) = api.check(plan).ranks
    reduced = [term for term in rank.collectives if term.kind == "all_reduce" and term.num_bytes > 1000]
    assert rank.collectives_agree and len(reduced) > 1
    assert sorted(term.num_bytes for term in reduced) == pool.run(real_buckets, 2, plan.to_json())[0]


def test_what_cannot_be_checked_is_refused_in_words(configs: Path) -> None:
    """Ranks that are not there, other models, missing models, a process that is in a group."""
    plan = priced(configs, "llama", "cpu:2x1", zero=2)
    with pytest.raises(UsageError, match="ranks 0 to 1, not 2"):
        api.check(plan, rank=2)
    with pytest.raises(UsageError, match="not both"):
        api.check(plan, rank=0, all_stages=True)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": "another"})})
    with pytest.raises(ModelError, match="another model"):
        api.check(other)
    with pytest.raises(ModelError, match="model object"):
        api.check(plan.model_copy(update={"model": plan.model.model_copy(update={"source": None})}))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RunError, match="process of its own"):
            api.check(plan)
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_object_is_checked_and_left_alone(configs: Path) -> None:
    """A module of the user's own is copied, not changed."""
    plan = priced(configs, "llama", "cpu:2x1", zero=3)
    model = api.build_model(plan).to_empty(device="cpu")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    inputs = {name: torch.zeros(2, 32, dtype=torch.int64) for name in ("input_ids", "labels")}
    anonymous = api.estimate(model, inputs, cluster="cpu:2x1", global_batch=32, seq_len=32, zero=3)
    (rank,) = api.check(anonymous, model, inputs).ranks
    assert rank.collectives_agree
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_the_report_is_a_table_and_json(configs: Path) -> None:
    """Both forms have the terms, the collectives and the phases of the step."""
    checked = api.check(priced(configs, "gpt2", "h100-sxm-80:2x1", zero=2))
    table, data = str(checked), json.loads(checked.to_json())
    assert "collectives agree" in table and "activations" in table
    (rank,) = data["ranks"]
    assert {"forward 1", "backward 1", "clip", "update"} <= {phase["phase"] for phase in rank["phases"]}
    assert rank["collectives_agree"] is True


def test_offloading_takes_bytes_off_the_device(configs: Path) -> None:
    """Each kind of offload has more on the host and less on the device."""
    plan = priced(configs, "llama", "h100-sxm-80:4x1", zero=3)
    away = [_offloaded(plan, offload) for offload in ((), ("activations",), ("activations", "optimizer", "parameters"))]
    peaks = [api.check(each).ranks[0] for each in away]
    held = [max(phase.num_bytes["host"] for phase in rank.phases) for rank in peaks]
    assert held[0] == 0 < held[1] < held[2]
    kept = [max(phase.num_bytes["activations"] for phase in rank.phases) for rank in peaks]
    assert kept[1] < kept[0] / 2
    assert peaks[2].checked_peak_bytes < peaks[0].checked_peak_bytes
    update = peaks[2].phases[-1]
    assert update.num_bytes["optimizer"] == update.num_bytes["gradients"] == 0


def _offloaded(plan: Plan, what: tuple[str, ...]) -> Plan:
    def changed(unit: Any) -> Any:
        return unit.model_copy(update={"strategy": unit.strategy.model_copy(update={"offload": what})})

    stages = tuple(s.model_copy(update={"units": tuple(map(changed, s.units))}) for s in plan.stages)
    return plan.model_copy(update={"stages": stages})
