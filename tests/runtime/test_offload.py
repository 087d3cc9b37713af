"""Training with parts of it on the host equals training without, and what goes there really goes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from galv.planner.plan import Offload, Plan, Strategy
from galv.runtime import offload
from tests.distributed_pool import Pool
from tests.plans import hand_made_plan, tiny_llama
from tests.runtime.training import assert_equal_training, train_alone, train_in_parallel

pytestmark = pytest.mark.slow

STATES: tuple[Offload, ...] = ("optimizer", "parameters")


def strategy(dp: int, zero: int, *away: Offload, **more: Any) -> Strategy:
    shard = dp if zero else 1
    return Strategy(dp_shard=shard, dp_replicate=dp // shard, zero=zero, offload=tuple(sorted(away)), **more)


CASES = {
    "activations, one device": (strategy(1, 0, "activations"), {}),
    "activations, recomputed": (strategy(2, 3, "activations", recompute="full"), {"num_microbatches": 2}),
    "activations, selective": (strategy(2, 2, "activations", recompute="selective"), {"num_microbatches": 2}),
    "optimizer, one device": (strategy(1, 0, "optimizer"), {}),
    "optimizer, zero 0": (strategy(2, 0, "optimizer"), {"num_microbatches": 2}),
    "optimizer, zero 1": (strategy(2, 1, "optimizer"), {"num_microbatches": 2}),
    "optimizer, zero 2": (strategy(2, 2, "optimizer"), {"num_microbatches": 2}),
    "everything, zero 3": (strategy(2, 3, "activations", *STATES), {"num_microbatches": 2}),
    "everything, pipeline": (
        strategy(1, 0, "activations", "optimizer"),
        {"num_microbatches": 4, "stages": (3, 2), "schedule": "1f1b"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_device(pool: Pool, case: str) -> None:
    """Losses, norms and weights are those of one process."""
    chosen, options = CASES[case]
    plan = hand_made_plan(tiny_llama(), chosen, **options)
    ranks = pool.run(train_in_parallel, plan.num_devices, "llama", plan, "adamw")
    assert_equal_training(train_alone("llama", "adamw"), ranks)


class _Counting(offload.HostMemory):
    """A host's memory that counts."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.stored: list[tuple[int, ...]] = []
        self.num_loaded = 0

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        self.stored.append(tuple(tensor.shape))
        return super().store(tensor)

    def load(self, host: torch.Tensor) -> torch.Tensor:
        self.num_loaded += 1
        return super().load(host)


def test_each_kept_tensor_goes_once_and_parameters_stay() -> None:
    """What autograd keeps goes to the host but for weights, and comes back in backward."""
    memory = _Counting()
    away = offload.ActivationOffload(memory)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
    for block in blocks:
        away.add(block)
    hidden = torch.randn(5, 8)
    for block in blocks:
        hidden = block(hidden)
    # Of each block the inputs of two products and of the activation; of weights none.
    assert memory.stored == [(5, 8)] * 9
    assert memory.num_loaded == 0
    hidden.sum().backward()
    assert memory.num_loaded == 9


def test_the_unit_before_is_fetched_ahead() -> None:
    """Backward of one unit begins to fetch the next one's tensors."""
    memory = _Counting()
    away = offload.ActivationOffload(memory)
    blocks = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    loaded_at: list[int] = []
    hidden = torch.randn(5, 8, requires_grad=True)
    for block in blocks:
        away.add(block)
        hidden = block(hidden)
        hidden.register_hook(lambda gradient: loaded_at.append(memory.num_loaded))
    hidden.sum().backward()
    assert loaded_at == [0, 2, 3]


def test_a_new_tensor_in_the_place_of_an_old_one_is_another() -> None:
    """Tensors that have gone free their memory, which a new one may get."""
    away = offload.ActivationOffload(offload.HostMemory(torch.device("cpu")))

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):  # each product is freed when the next is made, as it has gone to the host
                x = (x * 1.01).sin()
            return x

    chain, given = Chain(), torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(chain(given).sum(), given)
    away.add(chain)
    (gradient,) = torch.autograd.grad(chain(given).sum(), given)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "chosen, reason",
    [
        (strategy(2, 1, "parameters"), "under zero 3 only, not zero 1"),
        (strategy(2, 3, "parameters"), "both or neither"),
        (strategy(2, 3, "optimizer"), "both or neither"),
    ],
)
def test_what_means_nothing_is_refused(chosen: Strategy, reason: str) -> None:
    """Combinations that would move nothing are refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        hand_made_plan(tiny_llama(), chosen)


def test_masters_lie_on_the_host(pool: Pool) -> None:
    """Every group of every unit offloads its shards."""
    plan = hand_made_plan(tiny_llama(), strategy(1, 0, "optimizer"))
    assert pool.run(count_offloading_groups, 1, plan) == [5]


def count_offloading_groups(plan: Plan) -> int:
    from torch.distributed.fsdp import FSDPModule

    from tests.runtime.training import parallelize_tiny

    module = parallelize_tiny(tiny_llama(), plan)
    states = {m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)}  # modules may share one
    groups = [group for state in states if (group := state._fsdp_param_group) is not None]
    return sum(any(parameter.offload_to_cpu for parameter in group.fsdp_params) for group in groups)
