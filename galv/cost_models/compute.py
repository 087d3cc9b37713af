"""How long computation takes on one device: operators, units, gradient clipping and the optimizer's update.

Each operator takes the larger of its arithmetic and its memory traffic (the roofline), each at the rate that kernels
really reach, plus the device's smallest kernel time. A unit takes the larger of the sum of its operators and the time
its host needs to issue them: eager PyTorch launches one operator after the other, and small models are bound by that.
Collectives are not priced here.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from galv.cost_models.readings import Ratios, place, ratio_at, ratios
from galv.planner.graph import Operator, Phase, UnitFacts
from galv.planner.plan import OptimizerName, Precision
from galv.profiles.device import DeviceProfile, short_dtype
from galv.profiles.readings import AttentionReading, Traffic

_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

CLIP_BYTES_PER_PARAMETER = 12
"""Gradient clipping in fp32: the norm reads each gradient once (4), scaling reads and writes it (8)."""

UPDATE_BYTES_PER_PARAMETER: dict[OptimizerName, int] = {"adamw": 28, "sgd": 12}
"""Traffic of a fused fp32 update: adamw reads parameter, gradient and both moments and writes all but the gradient;
sgd reads parameter and gradient and writes the parameter."""

UNSCALE_BYTES_PER_PARAMETER = 8
"""fp16 training scales its loss; torch.amp.GradScaler then reads and writes each fp32 gradient once more."""


def operator_seconds(operator: Operator, device: DeviceProfile) -> float:
    """Device seconds of one operator; 0 for a view and for a collective. Host time is not in it, see `unit_seconds`.

    Where the device was measured its readings win, interpolated between shapes and sizes.
    """
    if device.measured is None:
        return curve_seconds(operator, device)
    return curve_seconds(operator, device) * _measured_ratio(operator, device)


def curve_seconds(operator: Operator, device: DeviceProfile) -> float:
    """`operator_seconds` by the device's rates alone."""
    kind = operator.kind
    if kind in ("view", "collective"):
        return 0.0
    traffic = (operator.bytes_read + operator.bytes_written) / device.achieved_bytes_per_second
    if kind == "memory":
        return device.kernel_seconds + traffic
    if kind == "matmul" and operator.matmul is not None:
        arithmetic = matmul_seconds(*operator.matmul, short_dtype(operator.dtype), device)
    elif kind == "attention" and operator.attention is not None:
        arithmetic = attention_seconds(operator, device)
    else:
        arithmetic = operator.flops / device.best_flops(operator.dtype)
    return device.kernel_seconds + max(arithmetic, traffic)


@lru_cache(maxsize=1 << 16)
def matmul_seconds(batch: float, m: float, n: float, k: float, dtype: str, device: DeviceProfile) -> float:
    """Arithmetic seconds of `batch` products of (m, k) with (k, n), memory traffic not counted.

    The output is cut into tiles, `num_multiprocessors` of which run at once; the library is taken to use the tile
    shape, and the split of k over idle multiprocessors, that end soonest. NVIDIA's "Matrix Multiplication Background"
    calls the two losses tile and wave quantization. The rate grows with the inner length as k / (k + half_k).
    """
    if min(batch, m, n, k) <= 0:
        return 0.0
    rate = device.best_flops(dtype) / device.num_multiprocessors
    return min(
        _tiled_seconds(batch * ceil(m / rows) * ceil(n / columns), 2.0 * rows * columns, k, share * rate, device)
        for rows, columns, share in _tiles(device)
    )


def _tiled_seconds(tiles: float, flops_per_k: float, k: float, rate: float, device: DeviceProfile) -> float:
    """Seconds of `tiles` output tiles when one multiprocessor works at `rate`, k split or not."""
    slots, ramp = device.num_multiprocessors, device.matmul_half_k
    waves = ceil(tiles / slots)
    splits = slots // ceil(tiles) if waves == 1 else 1
    best = waves * flops_per_k * (k + ramp) / rate
    if splits > 1:
        best = min(best, flops_per_k * (k / splits + ramp) / rate)
    return best


@lru_cache
def _tiles(device: DeviceProfile) -> tuple[tuple[int, int, float], ...]:
    """The device's tiles and their transposes."""
    upright = [(tile.m, tile.n, tile.share) for tile in device.matmul_tiles]
    return tuple(dict.fromkeys(upright + [(n, m, share) for m, n, share in upright]))


def attention_flops(batch: float, heads: float, query: float, key: float, head_dim: float, causal: bool) -> float:
    """Forward FLOPs of fused attention: two products over the scores that a causal mask leaves.

    A causal query at position i of q sees the keys up to i + key - query.
    """
    masked = (query - 1) / 2 if causal else 0.0
    seen = query * max(key - masked, 1.0)
    return 4.0 * batch * heads * head_dim * seen


ATTENTION_HALF_LENGTH = 450.0
"""Keys at which fused attention would run at half its best rate: FlashAttention-2's figures of causal attention on
A100 (head dim 128) rise from about 100 TFLOP/s at 512 keys to 190 at 16k."""
ATTENTION_SOFTMAX_DIM = 32.0
"""Exponentials of a score cost as much as its products over this many head dims: 16 a clock and multiprocessor against
2048 multiply-adds on A100, reached at half rate."""
USUAL_ATTENTION = (4096.0, 128.0)
"""Keys and head dim for which device profiles give the efficiency of attention."""


def attention_handicap(keys: float, head_dim: float) -> float:
    """How many times longer a FLOP of fused attention takes than at `USUAL_ATTENTION`."""

    def slowness(keys: float, head_dim: float) -> float:
        return (1 + ATTENTION_HALF_LENGTH / keys) * (1 + ATTENTION_SOFTMAX_DIM / head_dim)

    return slowness(keys, head_dim) / slowness(*USUAL_ATTENTION)


def attention_seconds(operator: Operator, device: DeviceProfile) -> float:
    """Arithmetic seconds of a fused attention kernel.

    Backward does 2.5 times the FLOPs of forward: five products instead of two (Dao, FlashAttention-2).
    """
    assert operator.attention is not None, "an attention operator carries its shape"
    _, _, _, key, head_dim, _ = operator.attention
    flops = attention_flops(*operator.attention) * attention_handicap(key, head_dim)
    peak = device.peak_flops.get(short_dtype(operator.dtype), device.peak_flops["fp32"])
    if operator.phase == "backward":
        return 2.5 * flops / (peak * device.attention_backward_efficiency)
    return flops / (peak * device.attention_forward_efficiency)


def phase_seconds(operators: tuple[Operator, ...], device: DeviceProfile) -> float:
    """Seconds of `operators` in sequence: as long as the device works or as the host issues them, whichever is more."""
    busy = sum(operator_seconds(operator, device) for operator in operators)
    launches = sum(operator.kind not in ("view", "collective") for operator in operators)
    return max(busy, launches * device.launch_seconds)


def unit_seconds(facts: UnitFacts, device: DeviceProfile) -> tuple[float, float]:
    """(forward, backward) seconds of one unit for one microbatch, collectives left out.

    The forward time is also what full recomputation adds to the backward.
    """
    return phase_seconds(facts.phase("forward"), device), phase_seconds(facts.phase("backward"), device)


def optimizer_seconds(
    num_parameters: float, optimizer: OptimizerName, precision: Precision, device: DeviceProfile
) -> float:
    """Seconds of the update of `num_parameters` on this device: memory-bound, with fp32 state at every precision."""
    update = _traffic_seconds(optimizer, num_parameters * UPDATE_BYTES_PER_PARAMETER[optimizer], device)
    unscale = UNSCALE_BYTES_PER_PARAMETER if precision == "fp16" else 0
    return update + num_parameters * unscale / device.achieved_bytes_per_second


def clip_seconds(num_parameters: float, device: DeviceProfile) -> float:
    """Seconds to take the norm of `num_parameters` local fp32 gradients and scale them; collectives are not counted."""
    return _traffic_seconds("clip", num_parameters * CLIP_BYTES_PER_PARAMETER, device)


# ----------------------------------------------------------------------------------------------- measured devices


def _traffic_seconds(kind: Traffic, num_bytes: float, device: DeviceProfile) -> float:
    """Seconds of work that moves `num_bytes`, by the device's readings of that kind where it has some."""
    seconds = num_bytes / device.achieved_bytes_per_second
    if device.measured is None or num_bytes <= 0:
        return seconds
    return device.measured.update_scale * seconds * ratio_at(_traffic_ratios(device, kind), place(num_bytes))


def _measured_ratio(operator: Operator, device: DeviceProfile) -> float:
    """Readings over curve for an operator of this shape."""
    assert device.measured is not None
    return device.measured.compute_scale * _shape_ratio(
        operator.kind,
        operator.phase,
        short_dtype(operator.dtype),
        operator.matmul,
        operator.attention,
        operator.bytes_read + operator.bytes_written,
        device,
    )


@lru_cache(maxsize=1 << 16)
def _shape_ratio(
    kind: str,
    phase: Phase,
    dtype: str,
    matmul: tuple[float, ...] | None,
    attention: tuple[float, float, float, float, float, bool] | None,
    num_bytes: float,
    device: DeviceProfile,
) -> float:
    if kind == "matmul" and matmul is not None and min(matmul) > 0:
        return ratio_at(_matmul_ratios(device, dtype), place(*matmul))
    if kind == "attention" and attention is not None:
        return ratio_at(_attention_ratios(device, dtype, phase, attention[-1]), place(*attention[:-1]))
    return ratio_at(_traffic_ratios(device, "elementwise"), place(num_bytes)) if num_bytes > 0 else 1.0


@lru_cache
def _matmul_ratios(device: DeviceProfile, dtype: str) -> Ratios:
    assert device.measured is not None
    readings = (r for r in device.measured.matmul if r.dtype == dtype)
    return ratios(
        [(place(*r.shape), r.seconds, curve_seconds(product_operator(r.shape, dtype), device)) for r in readings]
    )


def product_operator(shape: tuple[float, float, float, float], dtype: str) -> Operator:
    """A matrix product of (batch, m, n, k) as an operator."""
    batch, m, n, k = shape
    return Operator(
        name="matmul",
        kind="matmul",
        phase="forward",
        module="",
        dtype=dtype,
        flops=2 * batch * m * n * k,
        bytes_read=_BYTES.get(dtype, 4) * batch * (m * k + k * n),
        bytes_written=_BYTES.get(dtype, 4) * batch * m * n,
        matmul=shape,
    )


@lru_cache
def _attention_ratios(device: DeviceProfile, dtype: str, phase: Phase, causal: bool) -> Ratios:
    assert device.measured is not None
    readings = [r for r in device.measured.attention if (r.dtype, r.phase) == (dtype, phase)]
    alike = [r for r in readings if r.shape[-1] == causal] or readings
    return ratios([(place(*r.shape[:-1]), r.seconds, curve_seconds(_attention_operator(r), device)) for r in alike])


def _attention_operator(reading: AttentionReading) -> Operator:
    return Operator(
        name="attention",
        kind="attention",
        phase=reading.phase,
        module="",
        dtype=reading.dtype,
        attention=reading.shape,
    )


@lru_cache
def _traffic_ratios(device: DeviceProfile, kind: Traffic) -> Ratios:
    assert device.measured is not None
    launch = device.kernel_seconds if kind == "elementwise" else 0.0
    rate = device.achieved_bytes_per_second
    readings = (r for r in device.measured.traffic if r.kind == kind)
    return ratios([(place(r.num_bytes), r.seconds, launch + r.num_bytes / rate) for r in readings])
