"""Computation: FLOPs and bytes turn into seconds at the device's rates, and host time is a floor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galv.cost_models.compute import (
    attention_flops,
    attention_seconds,
    clip_seconds,
    matmul_seconds,
    operator_seconds,
    optimizer_seconds,
    phase_seconds,
    unit_seconds,
)
from galv.planner.graph import Operator, OperatorKind, Phase, UnitFacts
from galv.profiles.device import DeviceProfile, device_names, load_device

A100 = load_device("a100-sxm-80")
devices = st.sampled_from([load_device(name) for name in device_names()])
sizes = st.integers(1, 20_000)


def operator(kind: OperatorKind, phase: Phase = "forward", dtype: str = "bfloat16", **facts: Any) -> Operator:
    """An operator with the given facts."""
    return Operator("aten.some.default", kind, phase, "", dtype, **facts)


def matmul(m: int, n: int, k: int, phase: Phase = "forward") -> Operator:
    """A matrix product in bf16."""
    moved = {"bytes_read": 2.0 * (m * k + k * n), "bytes_written": 2.0 * m * n}
    return operator("matmul", phase, flops=2.0 * m * n * k, matmul=(1, m, n, k), **moved)


def facts(*operators: Operator) -> UnitFacts:
    """Facts of a unit that only computes."""
    return UnitFacts(operators, *[0.0] * 6)


# ----------------------------------------------------------------------------------------------- matrix products


@given(st.integers(1, 64), sizes, sizes, sizes, devices)
def test_no_product_beats_the_best_rate(batch: int, m: int, n: int, k: int, device: DeviceProfile) -> None:
    """Tiles, waves and short inner lengths only ever lose."""
    seconds = matmul_seconds(batch, m, n, k, "fp32", device)

    assert seconds >= 2.0 * batch * m * n * k / device.best_flops("fp32") * (1 - 1e-12)


@pytest.mark.parametrize("device", ["a100-sxm-80", "h100-sxm-80", "cpu"])
def test_large_products_come_near_the_best_rate(device: str) -> None:
    """A product of 16384 cubed runs within a tenth of the best rate."""
    profile = load_device(device)
    seconds = matmul_seconds(1, 16384, 16384, 16384, "bf16", profile)

    assert seconds == pytest.approx(2.0 * 16384**3 / profile.best_flops("bf16"), rel=0.1)


@given(st.integers(1, 8), sizes, sizes, sizes, devices)
def test_larger_products_are_never_faster(batch: int, m: int, n: int, k: int, device: DeviceProfile) -> None:
    """Doubling any length of a product never shortens it."""
    seconds = matmul_seconds(batch, m, n, k, "fp32", device)

    for larger in ((2 * batch, m, n, k), (batch, 2 * m, n, k), (batch, m, 2 * n, k), (batch, m, n, 2 * k)):
        assert matmul_seconds(*larger, "fp32", device) >= seconds * (1 - 1e-12)


@given(sizes, sizes, sizes, devices)
def test_products_are_symmetric(m: int, n: int, k: int, device: DeviceProfile) -> None:
    """A product and its transpose take equally long."""
    assert matmul_seconds(1, m, n, k, "fp32", device) == matmul_seconds(1, n, m, k, "fp32", device)


@given(st.integers(4, 64), st.sampled_from(["a100-sxm-80", "h100-sxm-80"]))
def test_twice_the_tokens_take_about_twice_as_long(hundreds: int, device: str) -> None:
    """For a layer of a large model, tile and wave effects stay within a fifth."""
    tokens, profile = 1024 * hundreds, load_device(device)
    once, twice = (operator_seconds(matmul(n, 14336, 4096), profile) for n in (tokens, 2 * tokens))

    assert twice == pytest.approx(2 * once, rel=0.2)


def test_a_short_inner_length_runs_at_half_the_rate() -> None:
    """At the half-saturation length a large product takes twice its time at the best rate."""
    k = int(A100.matmul_half_k)
    seconds = matmul_seconds(1, 108 * 256, 128 * 128, k, "bf16", A100)

    assert seconds == pytest.approx(2 * 2.0 * 108 * 256 * 128 * 128 * k / A100.best_flops("bf16"), rel=0.1)


def test_one_tile_too_many_costs_another_wave() -> None:
    """With a single tile shape, 109 tiles on 108 multiprocessors take two waves of long inner length."""
    single = A100.model_copy(update={"matmul_tiles": A100.matmul_tiles[1:2], "name": "one tile"})
    full, more = (matmul_seconds(tiles, 128, 128, 8192, "bf16", single) for tiles in (108, 109))

    assert more == pytest.approx(2 * full)


def test_idle_multiprocessors_split_a_long_inner_length() -> None:
    """A single tile with a very long inner length is spread over the device instead of waiting for one processor."""
    seconds = matmul_seconds(1, 128, 128, 1_000_000, "bf16", A100)

    assert seconds < 4 * 2.0 * 128 * 128 * 1_000_000 / A100.best_flops("bf16")


def test_thin_products_are_bound_by_memory() -> None:
    """A product with one row takes as long as reading the matrix."""
    thin = matmul(1, 16384, 16384)

    assert operator_seconds(thin, A100) == pytest.approx(2 * 16384**2 / A100.achieved_bytes_per_second, rel=0.05)


def test_an_empty_product_takes_no_arithmetic() -> None:
    """A length of zero is no work."""
    assert matmul_seconds(1, 0, 128, 128, "bf16", A100) == 0


def test_fp32_products_take_the_true_fp32_rate() -> None:
    """The ratio of fp32 to bf16 time is the ratio of their rates."""
    fp32, bf16 = (matmul_seconds(1, 8192, 8192, 8192, dtype, A100) for dtype in ("fp32", "bf16"))

    assert fp32 / bf16 == pytest.approx(A100.best_flops("bf16") / A100.best_flops("fp32"))


# ----------------------------------------------------------------------------------------------- attention


@given(st.integers(1, 4), st.integers(1, 32), st.integers(1, 64), st.integers(0, 64))
def test_causal_flops_count_the_scores_that_are_left(batch: int, heads: int, query: int, before: int) -> None:
    """The closed form is the count of unmasked scores, two products of 2 x head dim FLOPs each."""
    key = query + before
    seen = sum(i + before + 1 for i in range(query))

    assert attention_flops(batch, heads, query, key, 128, True) == pytest.approx(4 * batch * heads * 128 * seen)
    assert attention_flops(batch, heads, query, key, 128, False) == 4 * batch * heads * 128 * query * key


def test_attention_backward_does_five_products_for_two() -> None:
    """At equal efficiency backward takes 2.5 times as long as forward."""
    even = A100.model_copy(
        update={"attention_backward_efficiency": A100.attention_forward_efficiency, "name": "even attention"}
    )
    shape = (1.0, 32.0, 4096.0, 4096.0, 128.0, True)
    forward, backward = (attention_seconds(operator("attention", p, attention=shape), even) for p in PHASES)

    assert backward == pytest.approx(2.5 * forward)
    assert forward == pytest.approx(attention_flops(*shape) / (312e12 * A100.attention_forward_efficiency))


PHASES: tuple[Phase, Phase] = ("forward", "backward")


# ----------------------------------------------------------------------------------------------- operators and units


@given(st.floats(0, 1e12), st.floats(0, 1e12), devices)
def test_memory_operators_take_their_bytes(read: float, written: float, device: DeviceProfile) -> None:
    """Bytes read and written count alike, at the achievable bandwidth, on top of the smallest kernel's time."""
    seconds = operator_seconds(operator("memory", bytes_read=read, bytes_written=written), device)
    share = device.memory_bytes_per_second * device.memory_efficiency

    assert seconds == pytest.approx(device.kernel_seconds + (read + written) / share)


def test_a_gigabyte_moves_in_the_time_it_should() -> None:
    """1.6312 TB/s, 0.8 of 2.039, move 1 GB in 0.613 ms: the units are bytes and seconds."""
    assert operator_seconds(operator("memory", bytes_read=1e9), A100) == pytest.approx(6.13e-4, rel=0.01)


@pytest.mark.parametrize("kind", ["view", "collective"])
def test_views_and_collectives_are_free_here(kind: OperatorKind) -> None:
    """A view moves nothing, and collectives are priced elsewhere: neither takes device time or launches."""
    free = operator(kind, bytes_read=1e12)

    assert operator_seconds(free, A100) == 0
    assert phase_seconds((free,) * 10, A100) == 0


def test_flops_without_a_shape_run_at_the_best_rate() -> None:
    """A matrix product of unknown shape is priced by its FLOPs."""
    seconds = operator_seconds(operator("matmul", flops=1e15), A100)

    assert seconds == pytest.approx(A100.kernel_seconds + 1e15 / A100.best_flops("bf16"))


def test_many_small_operators_are_bound_by_their_launches() -> None:
    """A thousand tiny operators take the host a thousand launches; a large one hides its launch."""
    tiny, large = operator("memory", bytes_read=1.0), matmul(8192, 8192, 8192)

    assert phase_seconds((tiny,) * 1000, A100) == pytest.approx(1000 * A100.launch_seconds)
    assert phase_seconds((large,) * 10, A100) == pytest.approx(10 * operator_seconds(large, A100))
    assert operator_seconds(large, A100) > A100.launch_seconds


def test_a_unit_is_the_sum_of_its_phases() -> None:
    """Forward and backward operators are told apart, whatever their order of listing."""
    forward, backward = matmul(8192, 4096, 4096), matmul(8192, 4096, 8192, "backward")
    unit = facts(forward, forward, backward)

    assert unit_seconds(unit, A100) == pytest.approx(
        (2 * operator_seconds(forward, A100), operator_seconds(backward, A100))
    )


@given(sizes, sizes, sizes)
def test_a_better_device_is_never_slower(m: int, n: int, k: int) -> None:
    """H200 is H100 with more bandwidth: no operator takes longer on it."""
    for item in (matmul(m, n, k), operator("memory", bytes_read=1.0 * m * n)):
        assert operator_seconds(item, load_device("h200-sxm-141")) <= operator_seconds(item, load_device("h100-sxm-80"))


# ----------------------------------------------------------------------------------------------- optimizer


def test_updates_are_bound_by_memory() -> None:
    """AdamW moves 28 bytes a parameter, SGD 12; fp16 unscales its gradients first; halves take half as long."""
    adamw, sgd, fp16 = (
        optimizer_seconds(1e9, name, precision, A100)
        for name, precision in (("adamw", "bf16"), ("sgd", "bf16"), ("adamw", "fp16"))
    )

    assert adamw == pytest.approx(28e9 / A100.achieved_bytes_per_second)
    assert sgd == pytest.approx(adamw * 12 / 28)
    assert fp16 == pytest.approx(adamw * 36 / 28)
    assert optimizer_seconds(5e8, "adamw", "fp32", A100) == pytest.approx(adamw / 2)


def test_clipping_reads_twice_and_writes_once() -> None:
    """12 bytes for each local gradient."""
    assert clip_seconds(1e9, A100) == pytest.approx(12e9 / A100.achieved_bytes_per_second)
