"""The training loop, its made-up data and the single-process run that it is compared with."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from galv.errors import Diverged, ModelError, RunError, UsageError
from galv.planner.capture.glue import glue_for
from galv.planner.plan import InputSpec, Plan, Precision, Strategy
from galv.runtime.loss import Targets, loss_of, valid_count
from galv.runtime.parallelize import parallelize
from galv.runtime.synthetic import synthetic_batches
from galv.runtime.trainer import StepRecord, check_finite, single_process_losses, train
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, VOCABULARY, hand_made_plan

PIPELINE = {"stages": (2, 3), "schedule": "1f1b", "num_microbatches": 2}


def plan_for(name: str, strategy: Strategy, precision: Precision = "fp32", **options: object) -> Plan:
    """A hand-made plan with AdamW in that precision."""
    plan = hand_made_plan(MODELS[name](), strategy, **options)  # type: ignore[arg-type]  # checked by its own tests
    training = plan.training.model_copy(update={"precision": precision, "optimizer": "adamw"})
    return plan.model_copy(update={"training": training})


def meta_model(name: str) -> torch.nn.Module:
    """The tiny model without values."""
    with torch.device("meta"):
        return MODELS[name]()


# ----------------------------------------------------------------------------------------------- data


def test_data_does_not_depend_on_the_layout() -> None:
    """Batches are the same for every layout of a model and training, and differ by step and seed."""
    alone = hand_made_plan(MODELS["llama"]())
    pipeline = hand_made_plan(MODELS["llama"](), Strategy(dp_shard=2, zero=3), **PIPELINE)  # type: ignore[arg-type]
    first, second = itertools.islice(synthetic_batches(alone, 3), 2)
    again = next(synthetic_batches(pipeline, 3))
    other = next(synthetic_batches(alone, 4))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], second["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_data_is_of_the_plans_kind() -> None:
    """Tokens lie in the vocabulary and are their own labels; other inputs have their dtype, bound and batch dim."""
    plan = hand_made_plan(MODELS["llama"](), global_batch=6)
    extra = (
        InputSpec(name="pixels", shape=(3, 2, 4), dtype="bfloat16", batch_dim=1),
        InputSpec(name="classes", shape=(2,), dtype="int64", batch_dim=0, high=3),
        InputSpec(name="attention_mask", shape=(2, 5), dtype="bool", batch_dim=0),
        InputSpec(name="table", shape=(7,), dtype="float32", batch_dim=None),
    )
    model = plan.model.model_copy(update={"inputs": (*plan.model.inputs, *extra)})
    batch = next(synthetic_batches(plan.model_copy(update={"model": model})))
    assert batch["input_ids"].shape == (6, SEQ_LEN)
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < VOCABULARY
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((3, 6, 4), torch.bfloat16)
    assert set(batch["classes"].tolist()) <= {0, 1, 2}
    assert batch["attention_mask"].all()
    assert batch["table"].shape == (7,)


def test_a_model_learns_from_the_data() -> None:
    """The loss of 25 steps falls well below what knowing the vocabulary alone gives."""
    losses = single_process_losses(meta_model("llama"), hand_made_plan(MODELS["llama"]()), steps=25, lr=0.05)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert losses[-1] < losses[0] - 0.3


# ----------------------------------------------------------------------------------------------- training


def train_rank(name: str, plan: Plan, steps: int) -> list[StepRecord]:
    """The records of one rank, from a model on the meta device."""
    model = meta_model(name)
    glue = glue_for(model, plan) if plan.pipeline.degree > 1 else None
    module = parallelize(model, plan, glue=glue, device="cpu", seed=5)
    return list(train(module, synthetic_batches(plan, 5), steps=steps, optimizer=module.optimizer(lr=1e-3)))


@pytest.mark.parametrize(
    "name, plan, rtol",
    [
        ("gpt2", plan_for("gpt2", Strategy(dp_shard=2, zero=2)), 1e-4),
        ("llama-tied", plan_for("llama-tied", Strategy(), **PIPELINE), 1e-4),
        ("llama", plan_for("llama", Strategy(), "bf16", **PIPELINE), 1e-3),
        ("llama", plan_for("llama", Strategy(dp_shard=2, zero=3), "bf16"), 1e-3),
    ],
    ids=["zero2", "pipeline", "pipeline bf16", "zero3 bf16"],
)
def test_training_is_the_single_process_one(pool: Pool, name: str, plan: Plan, rtol: float) -> None:
    """Same seed, same losses, from meta weights to the last step, in the plan's precision."""
    expected = single_process_losses(meta_model(name), plan, steps=4, seed=5, lr=1e-3)
    for records in pool.run(train_rank, plan.num_devices, name, plan, 4):
        torch.testing.assert_close([record.loss for record in records], expected, rtol=rtol, atol=0)
        assert [record.step for record in records] == [1, 2, 3, 4]
        assert all(record.seconds > 0 and record.gradient_norm > 0 for record in records)
        assert records[-1].peak_bytes > 2**26


def diverge() -> str:
    """The message of a run whose weights are not numbers after the first step."""
    plan = plan_for("gpt2", Strategy(), **PIPELINE)
    model = meta_model("gpt2")
    module = parallelize(model, plan, glue=glue_for(model, plan), device="cpu")
    optimizer = module.optimizer(lr=float("inf"))
    with pytest.raises(RunError) as caught:
        list(train(module, synthetic_batches(plan), steps=3, optimizer=optimizer))
    return str(caught.value)


def test_a_loss_that_is_no_number_ends_the_run(pool: Pool) -> None:
    """Every rank raises one error that names the step and whose samples it was."""
    for message in pool.run(diverge, 2):
        assert message.startswith("the loss is nan at step 2, from the samples of ranks 0, 1;")


def test_only_ranks_with_a_bad_loss_are_named() -> None:
    """Of ranks with samples of their own, those whose loss is no number; none for a gradient norm alone."""
    with pytest.raises(Diverged, match="the loss is nan at step 3, from the samples of rank 1;"):
        check_finite(3, float("nan"), culprits=lambda: [1])
    with pytest.raises(Diverged, match="the gradient norm is inf at step 3;"):
        check_finite(3, 1.0, float("inf"), list)


# ----------------------------------------------------------------------------------------------- losses


def test_targets_are_counted_as_the_model_counts_them() -> None:
    """A causal language model predicts all but the first label; -100 does not count; without labels samples do."""
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, 7, 8]])
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    assert valid_count(MODELS["gpt2"](), batch) == 4
    assert Targets(shifted=False).count(batch) == 5
    assert Targets(shifted=False).count({"x": torch.zeros(3, 4)}) == 3
    assert Targets(shifted=False).count({"x": torch.zeros(3, 4), "labels": torch.zeros(3)}) == 3


def test_targets_are_found_by_name_and_type() -> None:
    """The first usual name with integers, unless the user names one; until then other integers are under suspicion."""
    integers, floats = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    batch = {"tokens": integers, "label": floats, "targets": integers, "weight": floats, "scale": 2.0}

    assert Targets(shifted=False).counted(batch) == "targets"
    assert Targets(shifted=False).others(batch) == ["tokens"]
    assert Targets(shifted=False, name="tokens").counted(batch) == "tokens"
    assert Targets(shifted=False, name="tokens").others(batch) == []
    assert Targets(shifted=False, name="label").counted(batch) is None
    assert Targets(shifted=False).count({"scale": 2.0, "x": floats}) == 2
    with pytest.raises(UsageError, match="no 'labels', which was named as targets; it has tokens, label"):
        Targets(shifted=False, name="labels").count(batch)


def test_the_mean_over_counted_targets_is_the_models_loss() -> None:
    """Weighting halves of a batch by `valid_count` gives the loss of the whole batch."""
    model = MODELS["llama"]()
    tokens = torch.randint(0, VOCABULARY, (2, SEQ_LEN))
    labels = tokens.clone()
    labels[0, :11] = -100
    halves = [{"input_ids": tokens[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)]
    counts = [valid_count(model, half) for half in halves]
    mean = sum(loss_of(model(**half)) * count for half, count in zip(halves, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(mean, loss_of(model(input_ids=tokens, labels=labels)))


def test_losses_are_found_or_missed_clearly() -> None:
    """A scalar, `.loss` and ["loss"] are losses; anything else is refused with what would work."""
    scalar = torch.tensor(1.0)
    assert loss_of(scalar) is scalar
    assert loss_of({"loss": scalar}) is scalar
    assert loss_of(MODELS["llama"]()(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.ones(1, 4).long())) > 0
    with pytest.raises(ModelError, match=r"a tensor of shape \(2,\), which is no loss"):
        loss_of(torch.zeros(2))
    with pytest.raises(ModelError, match="returned a dict with logits, which is no loss"):
        loss_of({"logits": scalar})
    with pytest.raises(ModelError, match="returned a tuple of 2, which is no loss"):
        loss_of((scalar, scalar))
    with pytest.raises(ModelError, match=r"returned a dict with loss whose loss is a tensor of shape \(3,\), which"):
        loss_of({"loss": torch.zeros(3)})
    with pytest.raises(ModelError, match="returned a CausalLMOutputWithPast with logits, which is no loss"):
        loss_of(MODELS["llama"]()(input_ids=torch.zeros(1, 4, dtype=torch.long)))
