"""The Python front door: what it refuses, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

import galv

TINY = str(Path(__file__).resolve().parents[1] / "configs" / "models" / "llama-tiny.json")


def estimated(**options: object) -> galv.Plan:
    """A small layout by hand with some options changed."""
    return galv.estimate(TINY, **({"cluster": "cpu:2x1", "seq_len": 64, "global_batch": 8} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "adam"}, galv.UnknownName, "unknown optimizer 'adam'. Did you mean 'adamw'?"),
        ({"precision": "fp8"}, galv.UnknownName, "unknown precision 'fp8'"),
        ({"recompute": "some"}, galv.UnknownName, "unknown recompute level 'some'"),
        ({"schedule": "zb"}, galv.UnknownName, "unknown schedule 'zb'"),
        ({"cluster": "tpu:2x1"}, galv.UnknownName, "unknown device 'tpu'"),
        ({"cluster": "cpu"}, galv.ClusterError, "DEVICE:DEVICES_PER_NODExNODES"),
        ({"global_batch": 0}, galv.UsageError, "at least 1, not 0"),
        ({"memory": 1000}, galv.UsageError, "1000 was asked for"),
        ({"memory": -1}, galv.UsageError, "-1 was asked for"),
        ({"tp": 2, "sequence": "ring"}, galv.UnknownName, "unknown sequence mode 'ring'"),
    ],
)
def test_refusals(options: dict[str, object], error: type[Exception], message: str) -> None:
    """A request that cannot be meant names what was given and what would work."""
    with pytest.raises(error) as caught:
        estimated(**options)

    assert message in str(caught.value)


def test_model_flops_follow_the_usual_count() -> None:
    """6 N T for the matrix products and 12 L s h T for attention, whatever kernels compute it."""
    plan = estimated(cluster="h100-sxm-80:2x1", precision="bf16", seq_len=128)
    tokens, layers, hidden, vocabulary = 8 * 128, 6, 256, 4096
    products = plan.model.num_parameters - vocabulary * hidden - (2 * layers + 1) * hidden

    assert plan.estimate.model_flops == pytest.approx((6 * products + 12 * layers * 128 * hidden) * tokens, rel=1e-3)


def test_without_a_wish_the_precision_suits_the_device() -> None:
    """GPUs with bf16 use it, a CPU computes in fp32."""
    assert estimated().training.precision == "fp32"
    assert estimated(cluster="a100-sxm-80:2x1").training.precision == "bf16"
    assert estimated(cluster="v100-sxm-32:2x1").training.precision == "fp32"
