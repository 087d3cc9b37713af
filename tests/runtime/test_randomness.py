"""Dropout under a plan: reproducible, alike where activations are alike, different where they are parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galv.planner.plan import Plan, Recompute, SequenceMode
from galv.runtime.parallelize import parallelize
from galv.runtime.randomness import Randomness
from tests.distributed_pool import Pool
from tests.layouts import gpt2_layouts
from tests.plans import hand_made_plan, random_batch, tiny_gpt2
from tests.runtime.test_parallelize import strategy

CPU = torch.device("cpu")


def with_dropout() -> nn.Module:
    """A GPT-2 whose residual and attention dropouts are at work."""
    model = tiny_gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


def masks(plan: Plan, seed: int) -> tuple[list[Tensor], list[Tensor], float, float]:
    """What a block's residual dropout and a dropout on its hidden layer zeroed, the loss, and the gradient norm."""
    model = with_dropout()
    residual: list[Tensor] = []
    hidden: list[Tensor] = []
    block = model.get_submodule("transformer.h.1.mlp")
    model.get_submodule("transformer.h.1.attn.resid_dropout").register_forward_hook(
        lambda module, args, output: residual.append(output == 0)
    )
    block.act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    block.act.register_forward_hook(lambda module, args, output: hidden.append(output == 0))
    module = parallelize(model, plan, seed=seed)
    torch.manual_seed(0)
    loss = module.train_step(module.shard_batch(random_batch(8, 0)))
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))  # the script's own numbers
    return residual, hidden, float(loss), float(module.clip_grad_norm_(1.0))


def plan_for(sequence: SequenceMode = "none", recompute: Recompute = "none", dp: int = 1) -> Plan:
    """A tensor-parallel plan, or a data-parallel one."""
    tp = 1 if dp > 1 else 2
    each = strategy(tp=tp, dp=dp, sequence=sequence, recompute=recompute)
    return hand_made_plan(with_dropout(), each, layouts=gpt2_layouts(tp, sequence) if tp > 1 else ())


def test_tensor_parallel_ranks_agree_where_activations_do(pool: Pool) -> None:
    """A replicated activation loses the same elements on every rank, a rank's share of a region its own."""
    first, second = pool.run(masks, 2, plan_for(), 0)
    assert torch.equal(first[0][0], second[0][0])
    assert not torch.equal(first[1][0], second[1][0])


def test_sequence_shards_are_independent(pool: Pool) -> None:
    """Parts of a sequence lose different elements."""
    first, second = pool.run(masks, 2, plan_for("megatron"), 0)
    assert not torch.equal(first[0][0], second[0][0])
    assert not torch.equal(first[1][0], second[1][0])


def test_data_parallel_groups_are_independent(pool: Pool) -> None:
    """Other samples lose other elements."""
    first, second = pool.run(masks, 2, plan_for(dp=2), 0)
    assert not torch.equal(first[0][0], second[0][0])


@pytest.mark.parametrize("sequence", ["none", "megatron"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_draws_the_same_again(pool: Pool, sequence: SequenceMode, recompute: Recompute) -> None:
    """With recompute, dropout drops the same in backward, and losses and gradients are those without."""
    expected = pool.run(masks, 2, plan_for(sequence), 0)
    found = pool.run(masks, 2, plan_for(sequence, recompute), 0)

    for (residual, hidden, *numbers), (_, _, *expected_numbers) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(expected_numbers, rel=1e-6)
        for twice in (residual, hidden):
            assert len(twice) == 2
            assert torch.equal(*twice)


def test_seeds_decide(pool: Pool) -> None:
    """The same seed gives the same masks, another seed others."""
    (first,), (again,), (other,) = (
        pool.run(masks, 1, one, seed) for one, seed in zip([_ONE] * 3, (0, 0, 1), strict=True)
    )
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], other[0][0])


_ONE = hand_made_plan(tiny_gpt2(), strategy())


def test_the_model_draws_from_a_state_of_its_own() -> None:
    """Inside, numbers continue the model's sequence; outside, the script's goes on as if nothing had been drawn."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    randomness = Randomness(CPU, seed=1)
    outside = [torch.rand(())]
    with randomness.active():
        inside = [torch.rand(())]
    outside.append(torch.rand(()))
    with randomness.active():
        inside.append(torch.rand(()))
    outside.append(torch.rand(()))

    assert torch.equal(torch.stack(outside), expected)
    assert torch.equal(torch.stack(inside), torch.rand(2, generator=torch.Generator().manual_seed(1)))
