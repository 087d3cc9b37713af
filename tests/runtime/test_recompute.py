"""What is kept for backward, and what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from galv.planner.plan import Recompute
from galv.runtime.recompute import _policy, apply_recompute, original_name


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def wrapped(recompute: Recompute) -> nn.Module:
    """A holder of one wrapped block with matrix products, an activation and dropout."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    holder = nn.Sequential(block)
    apply_recompute(holder, "0", recompute)
    return holder


def run(recompute: Recompute) -> tuple[Counter[str], int, dict[str, Tensor | None]]:
    """Operators of forward and backward, the bytes kept between them, and the gradients."""
    model = wrapped(recompute)
    torch.manual_seed(1)
    inputs = torch.randn(4, 8)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Counting() as counting:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(inputs).sum()
        loss.backward()
    gradients = {original_name(name): p.grad for name, p in model.named_parameters()}
    return counting.counts, sum(kept.values()), gradients


def test_full_runs_the_block_again_and_keeps_nothing_of_it() -> None:
    """Everything up to the last thing that backward needs runs twice, and no activation is kept."""
    plain, kept_plain, _ = run("none")
    full, kept_full, _ = run("full")

    assert plain["addmm"] == 2
    assert full["addmm"] == 4
    assert full["gelu"] == 2
    assert kept_full < kept_plain / 4


def test_selective_keeps_matrix_products_and_runs_the_rest_again() -> None:
    """Matrix products run once, what lies between them twice."""
    counts, _, _ = run("selective")
    assert counts["addmm"] == 2
    assert counts["gelu"] == 2


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_the_same_with_dropout(recompute: Recompute) -> None:
    """Recomputed dropout drops what it dropped the first time."""
    _, _, expected = run("none")
    _, _, found = run(recompute)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Counted(nn.Module):
    """A block whose output depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Bent more each time."""
        self.runs += 1
        self.seen = self.seen + x.detach().mean(0)
        return torch.tanh(self.inner(x) * self.runs.clone() + self.seen)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "statistics": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)),
    "average": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.GELU()),
    "counter": Counted,
    "power iteration": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.GELU(), nn.Linear(8, 8)),
}


def trained(kind: str, recompute: Recompute) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Buffers and gradients after two forwards at once and their backwards, as a pipeline does."""
    torch.manual_seed(0)
    model = nn.Sequential(BLOCKS[kind]())
    apply_recompute(model, "0", recompute)
    losses = [model(torch.randn(6, 8)).square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    gradients = {original_name(name): p.grad for name, p in model.named_parameters()}
    return {original_name(name): b.clone() for name, b in model.named_buffers()}, gradients


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_recomputing_changes_no_buffer(kind: str, recompute: Recompute) -> None:
    """Statistics, counters and the like move once a forward, and what is recomputed sees what the forward saw."""
    buffers, gradients = trained(kind, "none")
    again, same_gradients = trained(kind, recompute)

    assert buffers
    torch.testing.assert_close(again, buffers, rtol=0, atol=0)
    torch.testing.assert_close(same_gradients, gradients, rtol=1e-6, atol=1e-6)


def test_a_second_backward_recomputes_alike() -> None:
    """A graph that is kept gives the same gradients once more, and buffers stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(Counted())
    apply_recompute(model, "0", "full")
    loss = model(torch.randn(6, 8)).square().sum()
    weight = next(model.parameters())
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, second)
    assert float(dict(model.named_buffers())["0._checkpoint_wrapped_module.runs"]) == 1


def test_none_changes_nothing() -> None:
    """Without recompute the module is the user's own."""
    block = nn.Linear(2, 2)
    holder = nn.Sequential(block)
    apply_recompute(holder, "0", "none")
    assert holder[0] is block


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, True), (0.1, False)])
def test_attention_is_kept_unless_it_drops(dropout: float, kept: bool) -> None:
    """Fused attention that draws random numbers runs again, so that what follows draws as the first time."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert (_policy(None, attention, *[None] * 3, dropout) is CheckpointPolicy.MUST_SAVE) == kept
