"""A backward in two parts makes the gradients of one in one part, and keeps only factors in between."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from galv.runtime.weight_gradients import WeightGradients
from tests.plans import MODELS, random_batch


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_two_parts_are_the_whole(name: str) -> None:
    """Whole models: weights of matrix products, and no others, have no gradient until the second part."""
    model, batch = MODELS[name](), random_batch(3, seed=1)
    model(**batch).loss.backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()

    split = WeightGradients()
    with split:
        loss = model(**batch).loss
    loss.backward()
    missing = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    products = split.take()
    products.make()

    embeddings = {"transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight"}
    matrices = {key for key, parameter in model.named_parameters() if parameter.ndim == 2}
    assert missing == matrices - embeddings
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-5, atol=1e-7)


class Odd(nn.Module):
    """Products of several kinds: with a weight used twice, a view of one, by an activation, and by an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x @ self.weight, self.weight).tanh()
        y = nn.functional.linear(y, self.other.t().narrow(0, 0, 4))
        made = nn.functional.linear(y[0], self.other)
        return nn.functional.linear(y, made).square().mean() + torch.addmm(y[0, 0], y[0], self.other, beta=2).sum()


def test_what_is_no_weight_is_not_put_off() -> None:
    """A matrix that depends on an activation gets its gradient at once; a weight's uses add up."""
    torch.manual_seed(0)
    model, x = Odd(), torch.randn(2, 3, 4, requires_grad=True)
    model(x).backward()
    expected = [tensor.grad for tensor in (x, model.weight, model.other)]
    x.grad = None
    model.zero_grad()

    split = WeightGradients()
    split.surround(model)
    model(x).backward()
    assert torch.allclose(x.grad, expected[0], rtol=1e-5)
    split.take().make()
    assert torch.allclose(model.weight.grad, expected[1], rtol=1e-5)
    assert torch.allclose(model.other.grad, expected[2], rtol=1e-5)


def test_only_factors_are_kept_in_between() -> None:
    """What backward's first part has used up is freed, though the second is still to come."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    seen: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    split = WeightGradients()
    split.surround(model)
    loss = model(torch.randn(2, 4)).sum()
    assert seen[0]() is not None
    loss.backward()
    del loss
    products = split.take()

    assert seen[0]() is None
    products.make()
    assert all(parameter.grad is not None for parameter in model.parameters())
