"""Conservation: what must hold of every estimate whatever the constants, and what a stack may change."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

import galv
from galv.cost_models.stacked import WorkLibrary, smooth_max
from galv.cost_models.unit import total_flops
from galv.cost_models.work import unit_work
from galv.planner.by_stack import stage_exchanges
from galv.planner.graph import ModelGraph
from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.stack import StackProfile, load_stack, stack_names

CLUSTER = load_cluster("a100-sxm-80:8x4")
LAYOUT: dict[str, Any] = {"global_batch": 64, "seq_len": 1024, "micro_batch": 1, "tp": 2, "pp": 2, "zero": 1}


@pytest.fixture(scope="module")
def models() -> dict[int, ModelGraph]:
    """A decoder captured at two lengths."""
    transformers = pytest.importorskip("transformers")
    from galv.planner.capture.huggingface import builder

    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    return {length: galv.capture(builder(config), seq_len=length) for length in (1024, 2048)}


def price(graph: ModelGraph, cluster: ClusterProfile = CLUSTER, **changes: Any) -> Any:
    """The estimate of the usual layout with some of it changed."""
    given = {**LAYOUT, "stack": "megatron-core", "cluster": cluster, **changes}
    return galv.estimate(graph, **given).estimate


def with_device(**figures: Any) -> ClusterProfile:
    """The usual cluster with other device figures."""
    return CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update=figures)})


def with_link(which: str, **figures: Any) -> ClusterProfile:
    """The usual cluster with other figures of one link."""
    return CLUSTER.model_copy(update={which: getattr(CLUSTER, which).model_copy(update=figures)})


def test_twice_the_tokens_are_twice_the_product_flops(models: dict[int, ModelGraph]) -> None:
    """Products scale with samples exactly, attention with the square of the length."""
    assert total_flops(models[1024], 2) == 2 * total_flops(models[1024], 1)
    works = {length: WorkLibrary(graph) for length, graph in models.items()}
    for name in models[1024].classes:
        short, long = (g.source.facts(name, None, 1).phase("forward") for g in models.values())
        flops = [sum(op.flops for op in ops if op.kind == "matmul") for ops in (short, long)]
        assert flops[1] == pytest.approx(2 * flops[0])
    assert len(works) == 2


def test_context_parallelism_halves_work_and_activations(models: dict[int, ModelGraph]) -> None:
    """On twice the devices, cp 2 leaves each half the computation of blocks and half of what they keep."""
    busy = load_stack("megatron-core").model_copy(update={"host_seconds_per_block": 0.0, "name": "no host"})
    device = with_device(name="no launches", kernel_seconds=0.0).device
    given = {"seq_len": 2048, "tp": 1, "pp": 1, "zero": 0, "stack": busy}
    small, large = (load_cluster(f"a100-sxm-80:8x{n}").model_copy(update={"device": device}) for n in (4, 8))
    one, two = price(models[2048], small, **given), price(models[2048], large, cp=2, **given)
    blocks = [estimate.stages[0].units[1] for estimate in (one, two)]

    assert blocks[1].activations_bytes == pytest.approx(blocks[0].activations_bytes / 2, rel=1e-6)
    assert blocks[1].compute_seconds == pytest.approx(blocks[0].compute_seconds / 2, rel=0.05)


@pytest.mark.parametrize("stack", [*stack_names(), None])
@pytest.mark.parametrize("pp", [1, 2])
def test_more_memory_bandwidth_is_never_slower(models: dict[int, ModelGraph], stack: str | None, pp: int) -> None:
    """Raising the device's bandwidth raises no step time, under any stack and under galv's own runtime."""
    rate = CLUSTER.device.memory_bytes_per_second
    clusters = [with_device(memory_bytes_per_second=rate * k, name=f"x{k}") for k in (0.5, 1, 2, 4)]
    times = [price(models[1024], cluster, stack=stack, pp=pp).step_seconds for cluster in clusters]

    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(times))


@pytest.mark.parametrize("which", ["intra_node", "inter_node"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_slower_link_is_never_faster(models: dict[int, ModelGraph], which: str, zero: int) -> None:
    """Lower bandwidth or higher latency of any link makes no step shorter."""
    rate = getattr(CLUSTER, which).bytes_per_second
    for figures in ({"bytes_per_second": rate / 3}, {"latency_seconds": 1e-3}, {"base_seconds": 1e-3}):
        slow = price(models[1024], with_link(which, **figures), zero=zero).step_seconds
        assert slow >= price(models[1024], zero=zero).step_seconds * (1 - 1e-9)


def test_bytes_over_bandwidth_are_seconds(models: dict[int, ModelGraph]) -> None:
    """Where nothing but element-wise traffic costs, a block takes its fused bytes over the bandwidth."""
    free = with_device(
        name="free",
        matmul_efficiency=dict.fromkeys(CLUSTER.device.peak_flops, 1.0),
        peak_flops=dict.fromkeys(CLUSTER.device.peak_flops, 1e25),
        memory_bytes_per_second=1e9,
        memory_efficiency=1.0,
        kernel_seconds=0.0,
    )
    library = WorkLibrary(models[1024])
    name = models[1024].units[1].unit_class
    from galv.planner.space import Request, setting_for

    setting = setting_for(
        Request(4, 1024, "bf16", "adamw", 2**40), tp=1, sequence="none", dp=4, pp=1, num_microbatches=1
    )
    work = library.work(name, setting, whole=True)
    figures = load_stack("megatron-core").model_copy(
        update={"elementwise_factor": 1.0, "host_seconds_per_block": 0.0, "name": "fused"}
    )
    one = load_cluster("a100-sxm-80:4x1").model_copy(update={"device": free.device})
    found = price(models[1024], one, stack=figures, tp=1, pp=1, zero=0, global_batch=4)
    moved = sum(
        2.0 * b * (m * k + k * n + m * n) * count
        for phase in (work.forward, work.backward)
        for (b, m, n, k), _, count in phase.products
    )
    fused = sum(
        phase.norms.fused + phase.rotary.fused + phase.activation.fused + phase.other_bytes
        for phase in (work.forward, work.backward)
    )

    assert found.stages[0].units[1].compute_seconds == pytest.approx((moved + fused) / 1e9, rel=1e-6)


def test_element_wise_kinds_make_up_the_captured_traffic(models: dict[int, ModelGraph]) -> None:
    """Norms, rotation, activation and the rest are all that was captured; one kernel a kind moves what a count says."""
    graph = models[1024]
    name = graph.units[1].unit_class
    facts = graph.source.facts(name, None, 1)
    work = unit_work(facts)
    hidden, inner = 1024 * 1024 * 2, 1024 * 2816 * 2
    for phase in (work.forward, work.backward):
        operators = facts.phase("forward" if phase.is_forward else "backward")
        captured = sum(op.bytes_read + op.bytes_written for op in operators if op.kind == "memory")
        kinds = (phase.norms, phase.rotary, phase.activation)
        assert sum(kind.eager for kind in kinds) + phase.other_bytes == pytest.approx(captured)
        assert all(0 < kind.fused < kind.eager for kind in kinds)

    assert work.forward.norms.fused == pytest.approx((3 + 3 + 3) * hidden)
    assert work.forward.rotary.fused == pytest.approx(4 * hidden, rel=0.01)
    assert work.forward.activation.fused == pytest.approx(3 * inner)
    assert work.backward.activation.fused == pytest.approx(5 * inner)


@pytest.mark.parametrize("part", ["norms", "rotary", "activation"])
def test_a_fused_kernel_is_faster_than_eager_operators(models: dict[int, ModelGraph], part: str) -> None:
    """Under otherwise equal stacks."""
    busy = {"host_seconds_per_block": 0.0, "host_seconds_per_collective": 0.0}
    fused = load_stack("megatron-core").model_copy(update={**busy, "name": "fused"})
    eager = fused.model_copy(update={part: "eager", "name": "eager"})

    assert price(models[1024], stack=eager).step_seconds > price(models[1024], stack=fused).step_seconds


def test_a_pipeline_stage_between_others_exchanges_four_times_a_microbatch() -> None:
    """Two stages make two exchanges for each microbatch, more stages four; filling and draining pass every border."""
    assert stage_exchanges(1, 8) == 0
    assert stage_exchanges(2, 8) == 16
    assert stage_exchanges(4, 8) - stage_exchanges(4, 7) == 4
    assert stage_exchanges(8, 4) - stage_exchanges(4, 4) == 8


def test_recomputation_trades_time_for_memory(models: dict[int, ModelGraph]) -> None:
    """Full recomputation is slower and holds less."""
    none, full = (price(models[1024], recompute=level) for level in ("none", "full"))

    assert full.step_seconds > none.step_seconds
    assert max(full.peak_bytes) < max(none.peak_bytes)


def test_virtual_stages_shorten_the_step_and_hold_more(models: dict[int, ModelGraph]) -> None:
    """Interleaving makes the bubble smaller and keeps more microbatches alive on the first stage."""
    plain, woven = (price(models[1024], pp=4, global_batch=32, virtual_stages=v) for v in (1, 2))

    assert woven.step_seconds < plain.step_seconds
    assert woven.stages[0].memory.activations_bytes > plain.stages[0].memory.activations_bytes


def test_a_stack_plan_names_its_stack_and_does_not_run(models: dict[int, ModelGraph]) -> None:
    """A plan priced for other software says so, survives JSON, and is refused by the runtime."""
    plan = galv.estimate(models[1024], cluster=CLUSTER, stack="nanotron", **LAYOUT)

    assert galv.Plan.from_json(plan.to_json()) == plan
    assert plan.training.stack == "nanotron"
    with pytest.raises(galv.UsageError, match="nanotron"):
        galv.parallelize(None, plan)  # type: ignore[arg-type]


def test_a_captured_model_is_priced_like_the_model_itself(models: dict[int, ModelGraph]) -> None:
    """An estimate of a captured model under galv's runtime is fast the second time and the same."""
    first, second = (price(models[1024], stack=None, pp=1) for _ in range(2))

    assert first == second


@pytest.mark.parametrize("name", stack_names())
def test_stacks_have_few_fitted_constants_with_sources(name: str) -> None:
    """At most 10 fitted figures, each with a source; host times and shares in their ranges."""
    stack = load_stack(name)

    assert isinstance(stack, StackProfile)
    assert len(set(stack.fitted)) == len(stack.fitted) <= 10
    assert all(stack.sources[figure].strip() for figure in stack.fitted)


def test_an_unknown_stack_is_answered_with_the_known_ones() -> None:
    """The error lists the names."""
    with pytest.raises(galv.UnknownName, match="megatron-core"):
        load_stack("megatron-cor")


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (1.0, 1.0), (3.0, 2.0), (0.0, 0.0)])
def test_the_smooth_maximum_is_near_the_larger(a: float, b: float) -> None:
    """It is at least the larger and at most an eighth more."""
    assert max(a, b) <= smooth_max(a, b) <= max(a, b) * 1.125


def test_an_estimate_of_a_captured_model_takes_milliseconds(models: dict[int, ModelGraph]) -> None:
    """512 devices, 8 stages: under 5 ms at best of several tries, once the model's work is known."""
    cluster = load_cluster("h100-sxm-80:8x64")
    price(models[1024], cluster, pp=8, tp=4, global_batch=1024)
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        price(models[1024], cluster, pp=8, tp=4, global_batch=1024)
        seconds.append(time.perf_counter() - started)

    assert min(seconds) < 0.005
