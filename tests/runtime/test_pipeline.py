"""A model cut into pipeline stages computes what the whole model computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture.glue import trace_glue
from galv.planner.plan import Plan, ScheduleName, Strategy
from galv.runtime.borders import with_borders
from galv.runtime.loss import Targets, loss_of, microbatch_weights, weighted
from galv.runtime.pipeline import StageModule, build_stage, separate_copies, side_by_side
from galv.runtime.schedule import PipelineRunner
from galv.runtime.sized_glue import sized
from galv.schedules import SPLIT, Operation, orders
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, leaves, random_batch

CPU = torch.device("cpu")
STEPS = 5
CUTS = [(2, 3), (1, 4), (4, 1), (1, 1, 3), (1, 1, 1, 1, 1)]


def stages_of(model: nn.Module, plan: Plan) -> list[StageModule]:
    """All stages of the plan, over one model."""
    glue = bordered(trace_glue(model, leaves(model), random_batch(plan.micro_batch, 0)), plan)
    return [build_stage(model, plan, glue, index, CPU) for index in range(len(plan.stages))]


def bordered(glue: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """The forward as one rank would run it, of a plan that redistributes nothing."""
    return with_borders(sized(glue, plan), plan)


# ----------------------------------------------------------------------------------------------- the cut


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_stages_in_a_row_are_the_model(name: str, cut: tuple[int, ...]) -> None:
    """Loss and gradients are bit-equal to the model's, wherever the units are cut, also for another batch size."""
    model = MODELS[name]()
    batch = random_batch(3, seed=1)
    loss_of(model(**batch)).backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()

    carried: Sequence[Tensor] = ()
    for stage in stages_of(model, hand_made_plan(model, stages=cut, schedule="gpipe")):
        carried = stage(*carried, **{key: batch[key] for key in stage.input_names})
    carried.backward()

    assert {key: torch.equal(p.grad, expected[key]) for key, p in model.named_parameters()} == dict.fromkeys(
        expected, True
    )


def test_only_hidden_states_cross() -> None:
    """Position ids and rotary tables are computed again; one tensor crosses and each stage takes only its inputs."""
    model = MODELS["llama"]()
    first, middle, last = stages_of(model, hand_made_plan(model, stages=(2, 1, 2), schedule="gpipe"))
    assert [len(stage.crossings_out) for stage in (first, middle, last)] == [1, 1, 0]
    assert [stage.input_names for stage in (first, middle, last)] == [("input_ids",), (), ("labels",)]


def test_modules_are_the_users_own_under_their_own_names() -> None:
    """A stage holds the very modules of its units, reachable by their names in the model, and no others."""
    model = MODELS["gpt2"]()
    first, last = stages_of(model, hand_made_plan(model, stages=(2, 3), schedule="gpipe"))
    assert first.get_submodule("transformer.h.0") is model.get_submodule("transformer.h.0")
    assert {name for name, _ in first.named_parameters()} == {
        name for name, _ in model.named_parameters() if name.startswith(("transformer.w", "transformer.h.0."))
    }
    assert last.tied_copies == {"lm_head.weight"}
    assert first.tied_copies == frozenset()


def test_buffers_between_modules_follow_the_model() -> None:
    """A buffer that the glue uses is the model's own, so materializing one materializes the other."""
    model = MODELS["llama"]()
    stage = stages_of(model, hand_made_plan(model, stages=(2, 3), schedule="gpipe"))[1]
    assert stage.get_submodule("model.rotary_emb") is model.get_submodule("model.rotary_emb")


class Skipping(nn.Module):
    """A chain of blocks whose last one also takes the first one's output, beside a root buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = skip = self.first(x)
        for block in self.blocks:
            hidden = block(hidden) * self.scale
        with torch.no_grad():
            gate = skip.sigmoid()
        return nn.functional.mse_loss(self.last(hidden * gate + skip) + torch.tensor(1.0), y)


SKIPPING_UNITS = (("first",), ("blocks.0",), ("blocks.1",), ("last",))


def skipping_plan(order: Sequence[int] = (0, 1, 2, 3)) -> Plan:
    """Every unit of `Skipping` on a stage of its own."""
    plan = hand_made_plan(MODELS["gpt2"](2), stages=(1, 1, 1, 1), schedule="gpipe")
    units = [plan.stages[i].units[0].model_copy(update={"modules": SKIPPING_UNITS[i]}) for i in order]
    stages = tuple(stage.model_copy(update={"units": (u,)}) for stage, u in zip(plan.stages, units, strict=True))
    model = plan.model.model_copy(update={"tied": ()})
    return plan.model_copy(update={"stages": stages, "model": model})


def test_skip_connections_pass_through() -> None:
    """What a later stage takes from an earlier one passes the stages between, with its gradient if it has one."""
    torch.manual_seed(0)
    model, inputs = Skipping(), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    glue = trace_glue(model, [name for names in SKIPPING_UNITS for name in names], inputs)
    plan = skipping_plan()
    stages = [build_stage(model, plan, bordered(glue, plan), index, CPU) for index in range(4)]
    model(**inputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    carried: Sequence[Tensor] = ()
    for stage in stages:
        carried = stage(*carried, **{key: inputs[key] for key in stage.input_names})
    carried.backward()

    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert [crossing.needs_grad for crossing in stages[1].crossings_out] == [True, True, False]


def test_units_out_of_order_are_refused() -> None:
    """A plan whose units are not in the model's order is refused with the module and the stages."""
    model, inputs = Skipping(), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    glue = trace_glue(model, [name for names in SKIPPING_UNITS for name in names], inputs)
    plan = skipping_plan((1, 0, 2, 3))
    with pytest.raises(ModelError, match=r"module 'blocks.0' is on stage 0 but needs a value from stage 1"):
        build_stage(model, plan, bordered(glue, plan), 0, CPU)


def test_a_plan_of_another_model_is_refused() -> None:
    """A module that no unit holds is named."""
    llama = MODELS["llama"]()
    glue = trace_glue(llama, leaves(llama), random_batch(2, 0))
    gpt2 = MODELS["gpt2"]()
    with pytest.raises(ModelError, match=r"no unit of the plan holds module 'model.embed_tokens'"):
        bordered(glue, hand_made_plan(gpt2, stages=(2, 3), schedule="gpipe"))


def test_sequence_shards_cross_as_shards() -> None:
    """What a block with sequence sharding sends on is a rank's part of the sequence."""
    model = MODELS["llama"]()
    plan = hand_made_plan(model, stages=(2, 3), schedule="gpipe")
    units = plan.stages[0].units
    sharded = units[1].model_copy(update={"strategy": Strategy(tp=2, sequence="megatron")})
    stage = plan.stages[0].model_copy(update={"units": (units[0], sharded)})
    plan = plan.model_copy(update={"stages": (stage, plan.stages[1])})
    glue = trace_glue(model, leaves(model), random_batch(2, 0))
    (crossing,) = build_stage(model, plan, bordered(glue, plan), 1, CPU).crossings_in
    assert tuple(crossing.meta.shape) == (2, 8, 32)


# ----------------------------------------------------------------------------------------------- the schedule


def train_alone(
    model: nn.Module, num_samples: int, steps: int = STEPS
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of plain training on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model(**random_batch(num_samples, step)))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def train_stages(
    name: str, cut: tuple[int, ...], schedule: ScheduleName, num_microbatches: int, virtual_stages: int
) -> tuple[list[float], dict[str, Tensor], list[tuple[Operation, bool]]]:
    """Losses, this rank's final weights, and what it was told ahead of each operation of the last step."""
    model = MODELS[name]()
    plan = hand_made_plan(
        model,
        stages=cut,
        schedule=schedule,
        num_microbatches=num_microbatches,
        global_batch=2 * num_microbatches,
        virtual_stages=virtual_stages,
    )
    every = stages_of(model, plan)
    stages = [every[i] for i in plan.pipeline.stages_of_rank(dist.get_rank())]
    separate_copies(stages)
    for stage in stages:
        for module in stage.modules() if schedule in SPLIT else ():
            if type(module) is not nn.Module and not isinstance(module, StageModule) and not module._modules:
                stage.weight_gradients.surround(module)
        if stage.tied_copies:  # a copy is made equal to the first stage's weight, whatever it was
            with torch.no_grad():
                stage.get_parameter("lm_head.weight").zero_()
    told: list[tuple[Operation, bool]] = []
    runner = PipelineRunner(stages, plan, dist.group.WORLD, CPU, lambda *given: told.append(given))
    held = side_by_side(stages)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        told.clear()
        batch = random_batch(plan.training.global_batch, step)
        chunks = zip(*(tensor.chunk(num_microbatches) for tensor in batch.values()), strict=True)
        counts = torch.stack([Targets(shifted=True).count(dict(zip(batch, chunk, strict=True))) for chunk in chunks])
        losses.append(runner.step(batch, microbatch_weights(counts, None, 1)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in held.named_parameters()}, told


@pytest.mark.parametrize(
    "name, cut, schedule, num_microbatches, virtual_stages",
    [
        ("llama", (2, 3), "gpipe", 4, 1),
        ("llama", (4, 1), "1f1b", 4, 1),
        ("llama-tied", (1, 4), "1f1b", 2, 1),
        ("gpt2", (3, 2), "gpipe", 4, 1),
        ("gpt2", (2, 3), "1f1b", 4, 1),
        ("gpt2", (1, 3, 1), "1f1b", 5, 1),
        ("gpt2", (2, 1, 2), "1f1b", 2, 1),  # fewer microbatches than stages
        ("llama", (2, 1, 1, 1), "interleaved", 4, 2),
        ("llama-deep", (1, 2, 1, 1, 1, 1), "interleaved", 5, 3),  # not a multiple of the ranks
        ("gpt2", (1, 1, 2, 1), "interleaved", 1, 2),
        ("gpt2", (2, 1, 2), "zb-h1", 4, 1),
        ("gpt2", (1, 2, 1, 1), "zbv", 5, 2),  # tied weights on one rank
        ("llama", (1, 1, 2, 1), "zbv", 1, 2),
    ],
    ids=str,
)
def test_pipeline_trains_as_one_device(
    pool: Pool,
    name: str,
    cut: tuple[int, ...],
    schedule: ScheduleName,
    num_microbatches: int,
    virtual_stages: int,
) -> None:
    """Losses and all weights of 5 steps are one device's, and what runs is the order that is priced.

    With uneven stages, labels and tied weights.
    """
    losses, _, weights = train_alone(MODELS[name](), 2 * num_microbatches)
    num_ranks = len(cut) // virtual_stages
    results = pool.run(train_stages, num_ranks, name, cut, schedule, num_microbatches, virtual_stages)
    order = orders(schedule, num_ranks, num_microbatches, virtual_stages)
    seen = set()
    for rank, (stage_losses, stage_weights, told) in enumerate(results):
        torch.testing.assert_close(stage_losses, losses, rtol=1e-4, atol=0)
        for key, value in stage_weights.items():
            torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-6)
        assert [operation for operation, _ in told] == list(order.ranks[rank])
        lasts = [operation for operation, last in told if last]
        assert {chunk for _, chunk, _ in lasts} == {chunk for _, chunk, _ in order.ranks[rank]}
        assert all(kind != "forward" and i == num_microbatches - 1 for kind, _, i in lasts)
        seen |= stage_weights.keys()
    assert seen == {key for key in weights if "rotary" not in key}


def accumulate_twice() -> list[bool]:
    """Whether two steps without clearing gradients give twice the gradient, tied weights included."""
    model = MODELS["gpt2"]()
    plan = hand_made_plan(model, stages=(2, 3), schedule="1f1b", num_microbatches=2, global_batch=4)
    stage = stages_of(model, plan)[dist.get_rank()]
    runner = PipelineRunner([stage], plan, dist.group.WORLD, CPU)
    batch, weights = random_batch(4, 0), torch.tensor([0.25, 0.75])
    runner.step(batch, weights)
    once = [parameter.grad.clone() for parameter in stage.parameters()]
    runner.step(batch, weights)
    return [torch.allclose(p.grad, 2 * g) for p, g in zip(stage.parameters(), once, strict=True)]


def test_gradients_accumulate_over_steps(pool: Pool) -> None:
    """Gradients of two steps add up; the sum over copies of a tied weight is not summed again."""
    assert all(all(stage) for stage in pool.run(accumulate_twice, 2))


def train_behind_a_frozen_stage() -> list[tuple[str, Tensor | None]]:
    """Gradients of one step whose embedding, all of the first stage, is frozen."""
    model = MODELS["llama"]()
    model.get_input_embeddings().requires_grad_(False)
    plan = hand_made_plan(model, stages=(1, 2, 2), schedule="1f1b", num_microbatches=4, global_batch=4)
    stage = stages_of(model, plan)[dist.get_rank()]
    PipelineRunner([stage], plan, dist.group.WORLD, CPU).step(random_batch(4, 0), torch.full((4,), 0.25))
    return [(name, parameter.grad) for name, parameter in stage.named_parameters()]


def test_a_frozen_stage_has_no_backward(pool: Pool) -> None:
    """Where nothing trains no gradient is sent or awaited, and the stages behind it train."""
    gradients = dict(itertools.chain(*pool.run(train_behind_a_frozen_stage, 3)))
    assert [name for name, gradient in gradients.items() if gradient is None] == ["model.embed_tokens.weight"]


def refuse_bad_batches_on_the_last_stage() -> list[str]:
    """The messages for a batch without labels and one that cannot be cut."""
    model = MODELS["llama"]()
    plan = hand_made_plan(model, stages=(2, 3), schedule="gpipe", num_microbatches=2)
    rank = dist.get_rank()
    runner = PipelineRunner([stages_of(model, plan)[rank]], plan, dist.group.WORLD, CPU)
    messages: list[str] = []
    if rank == 0:
        return messages
    for batch in ({"input_ids": torch.zeros(4, 16)}, random_batch(3, 0)):
        with pytest.raises(UsageError) as caught:
            runner.step(batch, torch.ones(2))
        messages.append(str(caught.value))
    return messages


def test_bad_batches_are_refused(pool: Pool) -> None:
    """A missing input and a number of samples that does not divide are named."""
    _, (missing, uneven) = pool.run(refuse_bad_batches_on_the_last_stage, 2)
    assert missing == "the batch has no 'labels', which the model was planned with; it has input_ids"
    assert uneven == "3 samples of 'input_ids' cannot be cut into 2 equal microbatches"


# ----------------------------------------------------------------------------------------------- losses


def test_a_microbatch_without_targets_counts_for_nothing() -> None:
    """Its mean loss is not a number, yet loss and gradients stay numbers."""
    logits = torch.randn(4, 7, requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.full((4,), -100))
    assert loss.isnan()
    total = weighted(loss, torch.tensor(0.0))
    total.backward()
    assert total == 0
    assert torch.equal(logits.grad, torch.zeros(4, 7))


def test_weights_are_shares_of_all_targets() -> None:
    """Weights of the microbatches are in proportion to their targets and sum to 1, times the number of groups."""
    weights = microbatch_weights(torch.tensor([3, 0, 1]), None, 2)
    assert weights.tolist() == [1.5, 0.0, 0.5]
