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
        ({"global_batch": 2**40 + 1}, galv.UsageError, "global_batch can be at most 1099511627776"),
        ({"global_batch": 4.0}, galv.UsageError, "global_batch must be a whole number, not 4.0"),
        ({"global_batch": "4"}, galv.UsageError, "global_batch must be a whole number, not '4'"),
        ({"global_batch": None}, galv.UsageError, "global_batch must be a whole number, not None"),
        ({"global_batch": True}, galv.UsageError, "global_batch must be a whole number, not True"),
        ({"micro_batch": 1.0}, galv.UsageError, "micro_batch must be a whole number, not 1.0"),
        ({"tp": 2.0}, galv.UsageError, "tp must be a whole number, not 2.0"),
        ({"pp": "1"}, galv.UsageError, "pp must be a whole number, not '1'"),
        ({"zero": 1.5}, galv.UsageError, "zero must be a whole number, not 1.5"),
        ({"zero": -1}, galv.UsageError, "zero must be at least 0, not -1"),
        ({"seq_len": 64.5}, galv.UsageError, "seq_len must be a whole number, not 64.5"),
        ({"seq_len": 10**12}, galv.UsageError, "seq_len can be at most 16777216"),
        ({"memory": "4"}, galv.UsageError, "memory must be a number of GiB, not '4'"),
        ({"memory": float("nan")}, galv.UsageError, "nan was asked for"),
        ({"cluster": 4}, galv.UsageError, "cluster must be text such as"),
        ({"precision": 16}, galv.UsageError, "the precision must be one of bf16, fp16, fp32, not 16"),
        ({"units": "model.layers.*"}, galv.UsageError, "units must be a list of patterns"),
        ({"opaque": [1]}, galv.UsageError, "opaque must be a list of patterns"),
        ({"cluster": "cpu:1048576x1", "tp": 3}, galv.UsageError, "256, 512, ..., 524288, 1048576"),
        ({"cluster": "cpu:2x1", "tp": 2, "seq_len": 63, "sequence": "megatron"}, galv.UsageError, "sequence='none'"),
        ({"memory": 1000}, galv.UsageError, "1000 was asked for"),
        ({"memory": -1}, galv.UsageError, "-1 was asked for"),
        ({"memory": "120%"}, galv.UsageError, "at most 100%, not 120%"),
        ({"tp": 2, "sequence": "rings"}, galv.UnknownName, "unknown sequence mode 'rings'"),
        ({"tp": 2, "sequence": "ring"}, galv.UsageError, "cp > 1"),
        ({"offload": "optimizer"}, galv.UsageError, "must be a list"),
        ({"offload": ["optimiser"]}, galv.UnknownName, "unknown offload 'optimiser'"),
        ({"attention": "unfused"}, galv.UsageError, "for a stack only"),
    ],
)
def test_refusals(options: dict[str, object], error: type[Exception], message: str) -> None:
    """A request that cannot be meant names what was given and what would work."""
    with pytest.raises(error) as caught:
        estimated(**options)

    assert message in str(caught.value)


def test_the_absurd_is_priced() -> None:
    """The largest batch on one device, all at once, is a plan like another that does not fit."""
    plan = estimated(cluster="cpu:1x1", global_batch=2**40, micro_batch=2**40)

    assert not plan.estimate.fits
    assert "DOES NOT FIT" in str(plan)
    assert galv.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("model", [None, 4, ["m.json"], object()])
def test_what_is_no_model_is_refused(model: object) -> None:
    """A model of another type is answered with those that there are."""
    with pytest.raises(galv.ModelError, match=r"a model is text, an nn.Module or a function"):
        galv.estimate(model, cluster="cpu:2x1", global_batch=8)  # type: ignore[arg-type]


def test_numpys_whole_numbers_are_numbers() -> None:
    """Sizes computed by numpy give the very plan that Python's give."""
    size = pytest.importorskip("numpy").int64
    plan = estimated(global_batch=size(8), seq_len=size(64), micro_batch=size(2), tp=size(2), zero=size(0))

    assert plan == estimated(micro_batch=2, tp=2)
    assert galv.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seq_len": 64', '"seq_len": 32', "takes input_ids int64 (2, 32)"),
        ('"batch_dim": 0', '"batch_dim": 1', "the plan is for input_ids int64 (2, 64) (samples along dim 1)"),
        ('"dtype": "int64"', '"dtype": "float32"', "the plan is for input_ids float32"),
        ('"high": 4096', '"high": 5000', "below 4096, but the plan says 5000"),
    ],
)
def test_a_plan_with_other_inputs_than_the_models_is_refused(old: str, new: str, message: str) -> None:
    """An edited plan whose inputs the model would not take is refused before training starts."""
    text = estimated().to_json()
    assert old in text

    with pytest.raises(galv.ModelError) as caught:
        galv.build_model(galv.Plan.from_json(text.replace(old, new)))
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
