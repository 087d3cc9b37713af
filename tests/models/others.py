"""Plain models that are no language models: tables, graphs, images, a pair of adversaries, low-rank layers."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    """Tables of categories and a perceptron of numbers, all pairs of whose results are scored (arXiv 1906.00091)."""

    def __init__(self, rows: int = 100, num_tables: int = 4, width: int = 16, numbers: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(numbers, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        above = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, device=products.device)
        crossed = torch.cat((dense, products[:, above[0], above[1]]), 1)
        return F.binary_cross_entropy_with_logits(self.top(crossed).squeeze(-1), clicked)


class GraphLayer(nn.Module):
    """Each node takes the sum of its neighbours' messages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        messages = self.message(nodes)[sources]
        received = torch.zeros_like(nodes).index_add(0, targets, messages)
        return F.relu(self.own(nodes) + received)


class GraphNet(nn.Module):
    """Three rounds of messages over the edges of one large graph; nodes are the samples."""

    def __init__(self, features: int = 8, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.start = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(3))
        self.out = nn.Linear(width, classes)

    def forward(self, features: Tensor, sources: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
        nodes = self.start(features)
        for layer in self.layers:
            nodes = layer(nodes, sources, targets)
        return F.cross_entropy(self.out(nodes), classes)


class DoubleConv(nn.Module):
    """Two convolutions with normalization."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norm = nn.GroupNorm(4, made)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.second(F.silu(self.first(x)))))


class UNet(nn.Module):
    """Halves the image and doubles it again, each size joined to its like by a skip connection."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        ins = (3, *widths)
        self.downs = nn.ModuleList(DoubleConv(a, b) for a, b in zip(ins, widths, strict=False))
        self.middle = DoubleConv(widths[-1], 2 * widths[-1])
        outs = (2 * widths[-1], *reversed(widths))
        self.rises = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(outs))
        self.ups = nn.ModuleList(DoubleConv(2 * b, b) for b in outs[1:])
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x, skips = image, []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, up, skip in zip(self.rises, self.ups, reversed(skips), strict=True):
            x = up(torch.cat((rise(x), skip), 1))
        return F.mse_loss(self.out(x), target)


class SpaceTimeBlock(nn.Module):
    """Attends within each frame, then along time at each place; scaled and shifted by the diffusion step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.space = nn.MultiheadAttention(width, 4, batch_first=True)
        self.time = nn.MultiheadAttention(width, 4, batch_first=True)
        self.modulation = nn.Linear(width, 4 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        batch, frames, places, width = x.shape
        shift, scale, gate, gate_out = self.modulation(F.silu(step))[:, None, None].chunk(4, -1)
        near = (self.norms[0](x) * (1 + scale) + shift).flatten(0, 1)
        x = x + gate * self.space(near, near, near, need_weights=False)[0].view(batch, frames, places, width)
        along = self.norms[1](x).transpose(1, 2).flatten(0, 1)
        moved = self.time(along, along, along, need_weights=False)[0].view(batch, places, frames, width)
        x = x + moved.transpose(1, 2)
        out: Tensor = x + gate_out * self.perceptron(self.norms[2](x))
        return out


class SpaceTimeDiffusion(nn.Module):
    """Predicts the noise in a short film of latents, as diffusion transformers do (arXiv 2212.09748, 2401.03048)."""

    def __init__(self, channels: int = 4, width: int = 32, frames: int = 3, side: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(channels * 4, width)
        self.places = nn.Parameter(torch.zeros(1, 1, side * side, width))
        self.frames = nn.Parameter(torch.zeros(1, frames, 1, width))
        self.step = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(SpaceTimeBlock(width) for _ in range(depth))
        self.out = nn.Linear(width, channels * 4)

    def forward(self, film: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        share = step[:, None, None, None, None]
        x = self._embedded(film * (1 - share) + noise * share)
        condition = self.step(step[:, None])
        for block in self.blocks:
            x = block(x, condition)
        return F.mse_loss(self.out(x), self._patches(noise))

    def _embedded(self, film: Tensor) -> Tensor:
        embedded: Tensor = self.patches(self._patches(film)) + self.places + self.frames
        return embedded

    def _patches(self, film: Tensor) -> Tensor:
        batch, frames, channels, height, width = film.shape
        cut = film.view(batch, frames, channels, height // 2, 2, width // 2, 2)
        return cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, frames, height * width // 4, channels * 4)


class Places(nn.Module):
    """Adds what is trained for each place and each frame."""

    def __init__(self, width: int, places: int, frames: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(1, 1, places, width))
        self.frames = nn.Parameter(torch.zeros(1, frames, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places + self.frames


class SpaceTimeTransformer(SpaceTimeDiffusion):
    """The same with every parameter in a module that one unit holds."""

    def __init__(self) -> None:
        super().__init__()
        (_, _, num_places, width), num_frames = self.places.shape, self.frames.shape[1]
        del self.places, self.frames
        self.positions = Places(width, num_places, num_frames)

    def _embedded(self, film: Tensor) -> Tensor:
        embedded: Tensor = self.positions(self.patches(self._patches(film)))
        return embedded


class Adversaries(nn.Module):
    """A generator and a discriminator; the loss of both, as one step of training them together needs it."""

    def __init__(self, noise: int = 8, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, width, 4),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width // 2, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 1, 4),
        )

    def forward(self, noise: Tensor, image: Tensor) -> Tensor:
        made = self.discriminator(self.generator(noise)).flatten()
        real = self.discriminator(image).flatten()
        return F.softplus(-real).mean() + F.softplus(made).mean()


class LowRank(nn.Module):
    """A layer whose weight is the product of two thin matrices."""

    def __init__(self, given: int, made: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(given, rank) / given**0.5)
        self.right = nn.Parameter(torch.randn(rank, made) / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.left @ self.right


class LowRankPerceptron(nn.Module):
    """A classifier of low-rank layers."""

    def __init__(self, width: int = 32, rank: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRank(width, width, rank) for _ in range(depth))
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.out(x), classes)


class Mixed(nn.Module):
    """Takes integers, numbers and a mask by keyword, and has a loss in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.numbers = nn.Embedding(10, 16), nn.Linear(6, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.out = nn.Linear(16, 3)

    def forward(self, *, kind: Tensor, numbers: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = (self.kinds(kind) * mask[..., None]).sum(1) + self.numbers(numbers)
        return {"loss": F.cross_entropy(self.out(self.body(x)), labels)}
