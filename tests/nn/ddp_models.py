"""Models to train, and what their gradients should be: the mean of those of the ranks' shares."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn


class Shared(nn.Module):
    """One weight used twice, and under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Mixed(nn.Module):
    """float32 and bfloat16 parameters that alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 2
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float()


class Frozen(nn.Module):
    """A layer in the middle that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 6))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Branches(nn.Module):
    """Uses the branches it is told to, and never the last."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(branches))

    def forward(self, x: torch.Tensor, *chosen: int) -> torch.Tensor:
        for index in chosen:
            x = self.branches[index](x)
        return x


class Backwards(nn.Module):
    """Uses its layers in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6))


def convolutions() -> nn.Module:
    """Channels-last convolutions and BatchNorm."""
    layers = (
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2),
        nn.Flatten(),
        nn.Linear(18, 6),
    )
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def double() -> nn.Module:
    return mlp().double()


def complex_numbers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6, dtype=torch.complex64) for _ in range(2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "double": double,
    "complex": complex_numbers,
    "shared": Shared,
    "mixed": Mixed,
    "frozen": Frozen,
    "backwards": Backwards,
}


def batch(size: int, seed: int = 0, features: int = 6) -> torch.Tensor:
    """Samples for ``size`` ranks, four each."""
    return torch.randn(4 * size, features, generator=torch.Generator().manual_seed(seed))


def share(samples: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return samples[rank::size]


def loss(output: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.square().mean()


def expected_gradients(model: nn.Module, samples: torch.Tensor, size: int) -> list[torch.Tensor | None]:
    """The mean over ranks of the gradients of the losses of their shares, computed on one."""
    everybodys = []
    for rank in range(size):
        alone = copy.deepcopy(model)
        dtype = next(alone.parameters()).dtype
        loss(alone(share(samples, rank, size).to(dtype))).backward()
        everybodys.append(gradients(alone))
    return [None if parts[0] is None else sum(parts) / size for parts in zip(*everybodys, strict=True)]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model each time. Not for ranks that are threads: they share torch's random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()
