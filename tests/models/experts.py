"""A mixture of experts written with plain torch: its experts share their module, and nothing says what it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 64


class Bank(nn.Module):
    """Feed-forward networks, each token to those that are picked for it; every one is computed for every token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.first = nn.Parameter(torch.randn(size, WIDTH, 2 * WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(size, 2 * WIDTH) * 0.1)
        self.second = nn.Parameter(torch.randn(size, 2 * WIDTH, WIDTH) * 0.3)

    def reset_parameters(self) -> None:
        """New weights."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, *, share: Tensor, picks: Tensor) -> Tensor:
        """(tokens, width), as `x`; `share` and `picks` are (tokens, picks)."""
        shares = torch.zeros(len(x), self.size, dtype=share.dtype, device=x.device).scatter_add(1, picks, share)
        hidden = F.gelu(torch.einsum("tw,ewh->eth", x, self.first) + self.bias[:, None])
        return torch.einsum("eth,ehw,te->tw", hidden, self.second, shares)


class Block(nn.Module):
    """A residual mixture of experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts)
        self.bank = Bank(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        tokens = self.norm(x).flatten(0, 1)
        share, picks = self.router(tokens).softmax(-1).topk(2)
        return x + self.bank(tokens, share=share, picks=picks).view_as(x)


class Mixture(nn.Module):
    """Tokens through blocks to the mean cross entropy of the labels."""

    def __init__(self, num_blocks: int = 2, num_experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(num_experts) for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())
