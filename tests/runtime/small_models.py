"""Small models that are unlike language models from a library, and their training in one process and under a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import galv
from galv.planner.plan import Plan
from galv.runtime.loss import loss_of
from tests.plans import SEQ_LEN, VOCABULARY, random_batch

WIDTH = 16
STEPS = 3
GLOBAL_BATCH = 8
MAX_NORM = 0.5


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Tokens through blocks to the mean cross entropy of what it calls `targets`."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class Goals(Chain):
    """A chain whose targets have a name of their own."""

    def forward(self, input_ids: Tensor, goals: Tensor) -> Tensor:
        """The loss."""
        return super().forward(input_ids, goals)


class Logits(Chain):
    """A chain that leaves the loss to others."""

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Logits of shape (batch, sequence, vocabulary)."""
        return self.out(self.embedding(input_ids) + super().forward(input_ids, targets))


class Unused(Chain):
    """A chain with a parameter in each block that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_module("unused", nn.Linear(WIDTH, WIDTH))


class SometimesUsed(Chain):
    """A chain with a module that only some samples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """The loss, with a term of the rare module's where the first token is even."""
        loss = super().forward(input_ids, targets)
        return loss + self.rare(self.embedding(input_ids)).square().mean() if input_ids[0, 0] % 2 == 0 else loss


class Positioned(Chain):
    """A chain whose own forward reads a buffer that is not saved, beside one saved that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(0, 1, SEQ_LEN), persistent=False)
        self.register_buffer("trained_for", torch.tensor(7))

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(input_ids) + self.places[:, None]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class _Joint(nn.Module):
    """A projection of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.deep, self.shallow = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, shallow: Tensor, deep: Tensor) -> Tensor:
        """Logits."""
        return self.deep(deep) + self.shallow(shallow)


class Skip(Chain):
    """A chain whose head takes the output of unit `skipped` as well; the embedding is unit 0."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.skipped = skipped
        self.out = _Joint()

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        values = [self.embedding(input_ids)]
        for block in self.blocks:
            values.append(block(values[-1]))
        return F.cross_entropy(self.out(values[self.skipped], values[-1]).flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "goals": Goals,
    "logits": Logits,
    "unused": Unused,
    "sometimes": SometimesUsed,
    "positioned": Positioned,
    "foreign": lambda: nn.Linear(WIDTH, WIDTH),
    "skip embedding": lambda: Skip(0),
    "skip block": lambda: Skip(1),
}


def batch_for(name: str, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Tokens, and targets of which very different shares count."""
    batch = random_batch(num_samples, seed)
    return {"input_ids": batch["input_ids"], "goals" if name == "goals" else "targets": batch["labels"]}


def plan_for(name: str, world_size: int, **layout: Any) -> Plan:
    """A layout by hand on CPU ranks, in fp32."""
    return galv.estimate(
        MODELS[name](),
        batch_for(name, 2, 0),
        cluster=f"cpu:{world_size}x1",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        **layout,
    )


Result = tuple[list[float], dict[str, Tensor]]
"""Losses and final weights."""


def train_alone(name: str) -> Result:
    """What one process gets."""
    model = MODELS[name]()
    update = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model(**batch_for(name, GLOBAL_BATCH, step)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        update.step()
        update.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def train_in_parallel(name: str, plan: Plan, targets: str | None = None) -> Result:
    """What one rank gets; the weights on rank 0 only."""
    module = galv.parallelize(MODELS[name](), plan, targets=targets)
    update = module.optimizer("sgd", lr=0.3)
    losses = []
    for step in range(STEPS):
        losses.append(float(module.train_step(module.shard_batch(batch_for(name, GLOBAL_BATCH, step)))))
        module.clip_grad_norm_(MAX_NORM)
        update.step()
        update.zero_grad()
    return losses, module.full_state_dict()


def assert_equal_training(name: str, ranks: list[Result]) -> None:
    """Every rank saw the losses of one process, and rank 0 has its weights."""
    losses, weights = train_alone(name)
    for rank_losses, _ in ranks:
        torch.testing.assert_close(rank_losses, losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ranks[0][1], weights, rtol=1e-4, atol=2e-6)
