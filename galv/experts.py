"""Runs an experts module on the experts that one rank holds: what an `ExpertLayout` means when a module runs.

The module computes as it is, on the pairs of a token and an expert that fall to this rank's experts. Every rank sorts
its pairs by expert, sends each to the rank that has the expert, and gets its result back: nothing is dropped, and the
sums are those of one device (GShard, arXiv 2006.16668, without its capacity limit).

Two callers give the same wrapping different hands: the runtime exchanges real rows, the capture only records them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from galv.planner.plan import ExpertsModule


class Route(Protocol):
    """How the rows of one call travel: to the ranks of their experts, and back."""

    experts: Tensor
    """(rows received,) Of each row that comes here, its expert's position among those of this rank."""

    def there(self, rows: Tensor) -> Tensor:
        """The rows that come to this rank's experts, given this rank's, which are sorted by expert."""
        ...

    def back(self, rows: Tensor) -> Tensor:
        """This rank's rows in the order that they were sent in, given those that came here."""
        ...


Router = Callable[[Tensor, int], Route]
"""Makes the route of a call from the (experts,) int64 rows that this rank has for each expert, and their total."""


def exchange_tokens(module: nn.Module, part: ExpertsModule, num_experts: int, router: Router) -> None:
    """Makes `module`, which holds some of `num_experts` experts, take and give tokens for all of them. In place."""
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        def given(name: str) -> Any:
            return args[int(name)] if name.isdigit() else kwargs[name]

        def called(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
            new = {part.tokens: tokens, part.choices: choices, part.weights: weights}
            own = [new.get(str(i), value) for i, value in enumerate(args)]
            result: Tensor = compute(*own, **{key: new.get(key, value) for key, value in kwargs.items()})
            return result

        return _exchanged(called, given(part.tokens), given(part.choices), given(part.weights), num_experts, router)

    module.forward = forward


def _exchanged(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    tokens: Tensor,
    choices: Tensor,
    weights: Tensor,
    num_experts: int,
    router: Router,
) -> Tensor:
    num_choices = choices.shape[-1]
    chosen = choices.flatten()
    order = chosen.argsort(stable=True)
    ones = torch.ones_like(chosen, dtype=torch.int64)
    rows_each = ones.new_zeros(num_experts).scatter_add(0, chosen.long(), ones)
    route = router(rows_each, chosen.numel())
    rows, shares = route.there(tokens[order // num_choices]), route.there(weights.flatten()[order])
    results = route.back(compute(rows, route.experts[:, None].to(choices.dtype), shares[:, None]))
    return results[order.argsort()].unflatten(0, (-1, num_choices)).sum(1)


def set_counts(module: nn.Module, part: ExpertsModule, num_experts: int) -> None:
    """Tells `module` that it holds `num_experts` experts."""
    for name in part.counts:
        setattr(module, name, num_experts)
