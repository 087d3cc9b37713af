"""What a training loop may ask of a parallel model, and how it refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx, nn

from galv.errors import GalvError, ModelError, RunError, UnknownName, UsageError
from galv.planner.plan import Plan
from galv.runtime.parallelize import parallelize
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, random_batch
from tests.runtime.test_parallelize import layouts_for, strategy
from tests.runtime.training import parallelize_tiny


def plan_with(plan: Plan, **training: Any) -> Plan:
    """The plan with another training set-up."""
    return plan.model_copy(update={"training": plan.training.model_copy(update=training)})


# ----------------------------------------------------------------------------------------------- refusals


def _wrong_world() -> None:
    parallelize(MODELS["llama"](), hand_made_plan(MODELS["llama"](), strategy(dp=4)))


def _never() -> fx.GraphModule:
    raise AssertionError("traced for a plan that cannot run")


def _wrong_world_of_a_pipeline() -> None:
    model = MODELS["llama"]()
    plan = hand_made_plan(model, strategy(dp=2), stages=(2, 3), schedule="gpipe")
    parallelize(model, plan, glue=_never)


def _other_model_of_a_pipeline() -> None:
    plan = hand_made_plan(MODELS["llama"](), strategy(), stages=(2, 3), schedule="gpipe")
    parallelize(MODELS["gpt2"](), plan, glue=_never)


def _unknown_targets() -> None:
    model = MODELS["llama"]()
    parallelize(model, hand_made_plan(model, strategy(dp=2)), targets="lables")


def _other_model() -> None:
    parallelize(MODELS["gpt2"](), hand_made_plan(MODELS["llama"](), strategy(dp=2)))


def _deeper_model() -> None:
    model = MODELS["llama"]()
    parallelize(nn.Sequential(model, nn.Linear(2, 2)), hand_made_plan(model, strategy(dp=2)))


def _other_fingerprint() -> None:
    model = MODELS["llama"]()
    parallelize(model, hand_made_plan(model, strategy(dp=2)), fingerprint="of another")


def _unknown_device() -> None:
    model = MODELS["llama"]()
    parallelize(model, hand_made_plan(model, strategy(dp=2)), device="meta")


def _short_batch() -> None:
    module = parallelize(MODELS["llama"](), hand_made_plan(MODELS["llama"](), strategy(dp=2)))
    module.train_step(random_batch(3, 0))


def _short_global_batch() -> None:
    module = parallelize(MODELS["llama"](), hand_made_plan(MODELS["llama"](), strategy(dp=2)))
    module.shard_batch(random_batch(6, 0))


def _unknown_optimizer() -> None:
    module = parallelize(MODELS["llama"](), hand_made_plan(MODELS["llama"](), strategy(dp=2)))
    module.optimizer("adam", lr=1e-3)


def _forward_of_a_pipeline() -> None:
    model = MODELS["llama"]()
    module = parallelize_tiny(model, hand_made_plan(model, strategy(), stages=(2, 3), schedule="gpipe"))
    module(**random_batch(4, 0))


def _pipeline_without_glue() -> None:
    model = MODELS["llama"]()
    parallelize(model, hand_made_plan(model, strategy(), stages=(2, 3), schedule="gpipe"))


REFUSALS: list[tuple[Callable[[], None], type[GalvError], str]] = [
    (_wrong_world, RunError, "plan is for 4 devices .*this run has 2 ranks"),
    (_wrong_world_of_a_pipeline, RunError, "plan is for 4 devices .*this run has 2 ranks"),
    (_other_model_of_a_pipeline, ModelError, "'model.embed_tokens', which this one has not"),
    (_unknown_targets, UnknownName, "Did you mean 'labels'"),
    (_other_model, ModelError, "'model.embed_tokens', which this one has not"),
    (_deeper_model, ModelError, "made for another model than this Sequential"),
    (_other_fingerprint, ModelError, "this one has of another"),
    (_unknown_device, UsageError, "'cpu' and 'cuda'"),
    (_short_batch, UsageError, "3 samples of 'input_ids', but the plan needs 4"),
    (_short_global_batch, UsageError, "6 samples of 'input_ids', but the plan needs 8"),
    (_unknown_optimizer, UnknownName, "Did you mean 'adamw'"),
    (_forward_of_a_pipeline, UsageError, "call train_step"),
    (_pipeline_without_glue, ModelError, "traced forward"),
]


def refusal(index: int) -> str:
    """The message that a request is refused with."""
    request, kind, _ = REFUSALS[index]
    try:
        request()
    except kind as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[request.__name__[1:] for request, _, _ in REFUSALS])
def test_refusals(pool: Pool, index: int) -> None:
    """What cannot be meant is refused on every rank with both numbers or names."""
    for message in pool.run(refusal, 2, index):
        with pytest.raises(GalvError, match=REFUSALS[index][2]):
            raise GalvError(message)


# ----------------------------------------------------------------------------------------------- the rest


def sampled(plan: Plan) -> list[int]:
    """The first token of each of this rank's samples."""
    module = parallelize_tiny(MODELS["llama"](), plan)
    return module.shard_batch(random_batch(8, 0))["input_ids"][:, 0].tolist()


def test_ranks_of_one_data_group_share_samples(pool: Pool) -> None:
    """Tensor-parallel peers and pipeline stages get the same samples, data-parallel groups equal parts in order."""
    model, tokens = MODELS["llama"](), random_batch(8, 0)["input_ids"][:, 0].tolist()
    layouts = layouts_for("llama", strategy(tp=2))
    tensor = hand_made_plan(model, strategy(tp=2, dp=2), layouts=layouts)
    pipeline = hand_made_plan(model, strategy(dp=2), stages=(2, 3), schedule="gpipe", num_microbatches=2)

    assert pool.run(sampled, 4, tensor) == [tokens[:4], tokens[:4], tokens[4:], tokens[4:]]
    assert pool.run(sampled, 4, pipeline) == [tokens[:4], tokens[4:], tokens[:4], tokens[4:]]


def optimizer_groups() -> tuple[list[int], bool, bool]:
    """Sizes of the optimizer's groups under a plan with two kinds of meshes, and whether it works on many at once."""
    strategies = [strategy(dp_replicate=2, dp_shard=2, zero=3)] + [strategy(dp=4, zero=1)] * 4
    module = parallelize(MODELS["llama"](), hand_made_plan(MODELS["llama"](), strategies, global_batch=8))
    update = module.optimizer("adamw", lr=1e-3)
    return (
        [len(group["params"]) for group in update.param_groups],
        update.defaults["fused"],
        module.optimizer("sgd").defaults["foreach"],
    )


def test_optimizers_have_a_group_for_each_mesh(pool: Pool) -> None:
    """Parameters of units with other meshes come in groups of their own, so multi-tensor updates work."""
    sizes, fused, foreach = pool.run(optimizer_groups, 4)[0]
    assert sizes == [1, 29]
    assert fused
    assert foreach


def half_precision(overflow: bool) -> tuple[list[float], list[float], bool]:
    """Losses and gradient norms of fp16 steps, and whether the last step left gradients."""
    plan = plan_with(hand_made_plan(MODELS["llama"](), strategy(dp=2, zero=2), num_microbatches=2), precision="fp16")
    module = parallelize(MODELS["llama"](), plan)
    scale = module._parts.loss_scale
    assert scale is not None
    if overflow:
        scale.value = 2.0**120
    update = module.optimizer("adamw", lr=1e-2)
    losses, norms = [], []
    for _ in range(3):
        update.zero_grad()
        losses.append(float(module.train_step(module.shard_batch(random_batch(8, 0)))))
        norms.append(float(module.clip_grad_norm_(1.0)))
        update.step()
    return losses, norms, any(p.grad is not None for p in module.parameters())


def test_half_precision_keeps_its_gradients(pool: Pool) -> None:
    """Under fp16 the reported loss and the gradients are unscaled, and the loss falls."""
    model = MODELS["llama"]()
    model(**random_batch(8, 0)).loss.backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    for losses, norms, left in pool.run(half_precision, 2, False):
        assert losses[0] == pytest.approx(4.157, abs=0.01)
        assert losses[2] < losses[1] < losses[0]
        assert norms[0] == pytest.approx(expected, rel=0.02)
        assert left


def test_overflowing_steps_are_skipped(pool: Pool) -> None:
    """Gradients that are not finite are dropped, and the weights stay as they were."""
    for losses, norms, left in pool.run(half_precision, 2, True):
        assert losses == pytest.approx([losses[0]] * 3)
        assert norms == [0.0] * 3
        assert not left


def stale_half_precision() -> str:
    """The message for a second step over old gradients."""
    plan = plan_with(hand_made_plan(MODELS["llama"](), strategy(dp=2, zero=2)), precision="fp16")
    module = parallelize(MODELS["llama"](), plan)
    batch = module.shard_batch(random_batch(8, 0))
    module.train_step(batch)
    try:
        module.train_step(batch)
    except UsageError as error:
        return str(error)
    return "not refused"


def test_half_precision_needs_fresh_gradients(pool: Pool) -> None:
    """Gradients that are scaled down already cannot be added to."""
    assert all("zero_grad" in message for message in pool.run(stale_half_precision, 2))


def accumulated(plan: Plan) -> tuple[float, float]:
    """The gradient norms after one step's backward and after another of the same samples."""
    module = parallelize_tiny(MODELS["gpt2"](), plan)
    batch = module.shard_batch(random_batch(8, 0))
    module.train_step(batch)
    once = float(module.clip_grad_norm_(1e9))
    module.train_step(batch)
    return once, float(module.clip_grad_norm_(1e9))


ACCUMULATING: dict[str, dict[str, Any]] = {
    **{f"zero{level}": {"strategies": strategy(dp=2, zero=level)} for level in range(4)},
    "pp2": {"strategies": strategy(), "stages": (3, 2), "schedule": "1f1b"},
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_gradients_accumulate_over_steps(pool: Pool, name: str) -> None:
    """Without zeroing, a second step adds its gradients to the first one's."""
    plan = hand_made_plan(MODELS["gpt2"](), num_microbatches=2, **ACCUMULATING[name])
    for once, twice in pool.run(accumulated, 2, plan):
        assert once > 0
        assert twice == pytest.approx(2 * once, rel=1e-5)
