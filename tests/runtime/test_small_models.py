"""Models unlike those of libraries train under plans as in one process: other names, unused parts, skips, buffers."""

from __future__ import annotations

import pytest
import torch

import galv
from galv.errors import GalvError, ModelError, UnknownName, UsageError
from galv.planner.plan import Plan
from galv.runtime.replicas import Replicas
from tests.distributed_pool import Pool
from tests.runtime.small_models import (
    GLOBAL_BATCH,
    MODELS,
    assert_equal_training,
    batch_for,
    plan_for,
    train_in_parallel,
)

# ----------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=["ddp", "pp2"])
def test_usual_names_of_targets_are_known(pool: Pool, layout: dict[str, int]) -> None:
    """Microbatches count by their valid targets where these are called `targets` as where they are called `labels`."""
    plan = plan_for("chain", 2, micro_batch=2, **layout)
    assert_equal_training("chain", pool.run(train_in_parallel, 2, "chain", plan))


def test_targets_of_other_names_can_be_named(pool: Pool) -> None:
    """The input named to `parallelize` is the one whose valid targets count."""
    plan = plan_for("goals", 2, micro_batch=2)
    assert_equal_training("goals", pool.run(train_in_parallel, 2, "goals", plan, "goals"))


def refused_goals(plan: Plan) -> tuple[bool, str]:
    """Whether this rank's samples have an ignored target, and what is said of a step with them."""
    module = galv.parallelize(MODELS["goals"](), plan)
    batch = batch_for("goals", GLOBAL_BATCH, 0)
    batch["goals"][1:] = 3  # the first sample has ignored targets, and the first rank has it
    part = module.shard_batch(batch)
    with pytest.raises(UsageError) as caught:
        module.train_step(part)
    return bool((part["goals"] == -100).any()), str(caught.value)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=["ddp", "pp2"])
def test_unknown_targets_with_ignored_ones_are_refused(pool: Pool, layout: dict[str, int]) -> None:
    """-100 in an input that is not counted is refused on all ranks, wherever it is, with what would work."""
    results = pool.run(refused_goals, 2, plan_for("goals", 2, micro_batch=2, **layout))

    assert [holds for holds, _ in results] == ([True, True] if layout else [True, False])
    for _, message in results:
        assert message.startswith("'goals' holds -100")
        assert 'galv.parallelize(model, plan, targets="goals")' in message


# ----------------------------------------------------------------------------------------------- parts without use


def test_parameters_without_use_do_not_disturb_replicas(pool: Pool) -> None:
    """Parameters that no loss reaches leave everything else as in one process."""
    plan = plan_for("unused", 2, micro_batch=2)
    assert_equal_training("unused", pool.run(train_in_parallel, 2, "unused", plan))


def sometimes() -> list[float | None]:
    """For each of some steps, the norm of the averaged gradient of a module that not every rank goes through."""
    model = MODELS["sometimes"]()
    replicas = Replicas(model, torch.distributed.group.WORLD)
    norms: list[float | None] = []
    for even_ranks in ([0], [], [0, 1], [1]):
        batch = batch_for("sometimes", 4, 0)
        batch["input_ids"][:, 0] = 2 if torch.distributed.get_rank() in even_ranks else 3
        replicas(**batch).backward()
        rare = model.get_submodule("rare").weight.grad
        norms.append(None if rare is None else float(rare.norm()))
        model.zero_grad()
    assert replicas.finds_unused
    return norms


def test_ranks_may_use_different_parameters(pool: Pool) -> None:
    """All ranks get one average, half as long where one of two ranks went through a module, none where no rank did."""
    results = pool.run(sometimes, 2)
    one, nobody, both, other = results[0]

    assert results[0] == results[1]
    assert nobody is None
    assert both is not None
    assert one == other == pytest.approx(both / 2)


def form_of_replicas(name: str) -> tuple[bool, bool]:
    """Whether DDP looks for unused parameters, after an evaluation only and after a step."""
    model = MODELS[name]()
    replicas = Replicas(model, torch.distributed.group.WORLD)
    with torch.no_grad():
        replicas(**batch_for(name, 2, 0))
    before = replicas.finds_unused
    replicas(**batch_for(name, 2, 0)).backward()
    return before, replicas.finds_unused


@pytest.mark.parametrize(("name", "finds"), [("chain", False), ("unused", True)])
def test_only_models_with_unused_parameters_pay_for_them(pool: Pool, name: str, finds: bool) -> None:
    """DDP looks for unused parameters where there are some, and nowhere else."""
    assert pool.run(form_of_replicas, 2, name) == [(False, finds)] * 2


# ----------------------------------------------------------------------------------------------- pipelines


def test_buffers_of_the_root_cross_no_stage_and_stay_what_they_are(pool: Pool) -> None:
    """A buffer that the root reads is where it is read; saved ones are saved, read or not, and others are not."""
    plan = plan_for("positioned", 2, pp=2, micro_batch=2)
    assert_equal_training("positioned", pool.run(train_in_parallel, 2, "positioned", plan))


@pytest.mark.parametrize("name", ["skip embedding", "skip block"])
def test_skips_cross_beside_the_activation(pool: Pool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head has a stage of its own, each tensor that crosses changes from its own layout to the head's."""
    # The planner leaves such plans out, since other cuts of them cannot run.
    monkeypatch.setattr("galv.planner.space.skip", lambda graph: None)
    plan = plan_for(name, 4, tp=2, pp=2, micro_batch=4)
    units = tuple(plan.units())
    pairs = zip(plan.stages, (units[:-1], units[-1:]), strict=True)
    plan = plan.model_copy(update={"stages": tuple(stage.model_copy(update={"units": us}) for stage, us in pairs)})
    assert any(unit.activation.kind == "S" for unit in units)

    assert_equal_training(name, pool.run(train_in_parallel, 4, name, plan))


# ----------------------------------------------------------------------------------------------- refusals


def refusal(name: str, plan: Plan, targets: str | None) -> tuple[str, str]:
    """The kind and message of the error that a first step, or what comes before it, ends with."""
    try:
        module = galv.parallelize(MODELS[name](), plan, targets=targets)
        module.train_step(module.shard_batch(batch_for(name, GLOBAL_BATCH, 0)))
    except GalvError as error:
        return type(error).__name__, str(error)
    return "none", ""


LAYOUTS: dict[str, dict[str, int]] = {"ddp": {}, "zero3": {"zero": 3}, "pp2": {"pp": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_without_a_loss_are_refused(pool: Pool, layout: str) -> None:
    """A model that returns logits is refused on every rank with their shape and what would work."""
    plan = plan_for("chain", 2, micro_batch=2, **LAYOUTS[layout])
    for kind, message in pool.run(refusal, 2, "logits", plan, None, timeout_seconds=30):
        assert kind == ModelError.__name__
        assert message.startswith("the model returned a tensor of shape (2, 16, 64), which is no loss;")
        assert "`.loss`" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unknown_names_of_targets_are_refused(pool: Pool, layout: str) -> None:
    """The inputs are listed."""
    plan = plan_for("chain", 2, micro_batch=2, **LAYOUTS[layout])
    for kind, message in pool.run(refusal, 2, "chain", plan, "target", timeout_seconds=30):
        assert kind == UnknownName.__name__
        assert message == "unknown input 'target'. Did you mean 'targets'? Known: input_ids, targets"


@pytest.mark.parametrize("layout", ["ddp", "pp2"])
def test_other_models_are_refused_before_they_are_traced(pool: Pool, layout: str) -> None:
    """Whatever the plan, a model that lacks its units or has other parameters is named as another model."""
    plan = plan_for("chain", 2, micro_batch=2, **LAYOUTS[layout])
    for name in ("foreign", "skip block", "unused"):
        for kind, message in pool.run(refusal, 2, name, plan, None, timeout_seconds=30):
            assert kind == ModelError.__name__
            assert message.startswith("the plan was made for another model than this")
