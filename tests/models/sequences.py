"""Plain models over sequences: an LSTM language model, a TDNN with a loss of its own, tied weights, a LoRA decoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Predicts each next token with two LSTM layers."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class SmoothedError(torch.autograd.Function):
    """The Huber-like error sqrt(1 + d^2) - 1, with the gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, difference: Tensor) -> Tensor:
        root = torch.sqrt(1 + difference * difference)
        ctx.save_for_backward(difference, root)
        return (root - 1).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        difference, root = ctx.saved_tensors
        return grads[0] * difference / root / difference.numel()


class TDNN(nn.Module):
    """Dilated convolutions over time, pooled by mean and deviation, with `SmoothedError` as loss."""

    def __init__(self, features: int = 8, width: int = 32, outputs: int = 4) -> None:
        super().__init__()
        sizes = [features, width, width, width]
        self.frames = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 3, dilation=d), nn.ReLU(), nn.BatchNorm1d(b))
            for a, b, d in zip(sizes, sizes[1:], (1, 2, 3), strict=False)
        )
        self.out = nn.Linear(2 * width, outputs)

    def forward(self, sound: Tensor, target: Tensor) -> Tensor:
        for layer in self.frames:
            sound = layer(sound)
        pooled = torch.cat((sound.mean(-1), sound.std(-1)), -1)
        loss = SmoothedError.apply(self.out(pooled) - target)
        assert isinstance(loss, Tensor)
        return loss


class Attention(nn.Module):
    """Causal self-attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a perceptron around a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(width), Attention(width)
        self.before_up, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.before_up(x))))
        return out


class Decoder(nn.Module):
    """A small decoder whose positions are a parameter of the model itself, and whose head is the embedding's table."""

    def __init__(self, vocabulary: int = 64, width: int = 32, length: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), "logits": logits}


class LoRALinear(nn.Module):
    """A frozen layer with a trainable product of two thin ones beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(inner.in_features, rank, bias=False),
            nn.Linear(rank, inner.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


def lora_decoder() -> nn.Module:
    """A `Decoder` that is frozen but for low-rank additions to its perceptrons."""
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = LoRALinear(block.up)  # type: ignore[assignment]
    return model
