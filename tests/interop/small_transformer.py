"""A transformer that trains in milliseconds, and its training in one process, as the reference."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))


def transformer() -> nn.Sequential:
    """The same weights wherever it is made."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a step, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))


def train(
    model: nn.Module, rank: int = 0, size: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train on this rank's part of three batches; the losses of that part."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        inputs, targets = (part.chunk(size)[rank] for part in batch(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
