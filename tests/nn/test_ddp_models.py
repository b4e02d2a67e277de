"""Models of many kinds get the averages that one process computes, in memory that ranks share or not.

Which memory backward asks torch's allocator for, and by which of its functions, depends on the layers: oneDNN
and MKL make buffers, recurrent layers and checkpoints run several backwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from worlds import run

RANKS = 2
STEPS = 4  # the second makes the buckets anew, later ones may have more blocks


class Calls(nn.Module):
    """Calls a function with the module and the sample; attributes are layers or parameters."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.function(self, sample)


class Kind(NamedTuple):
    """A model, its samples, and how far results may differ."""

    make: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], torch.Tensor]
    tolerance: float = 1e-4


def normal(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def words(limit: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(limit, shape, generator=generator)


def block(channels: int) -> nn.Module:
    return Calls(
        lambda self, x: torch.relu(x + self.norm(self.second(torch.relu(self.first(x))))),
        first=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        second=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        norm=nn.GroupNorm(8, channels),
    )


def residual() -> nn.Module:
    layers = [nn.Conv2d(3, 64, 7, 2, 3), block(64), nn.Conv2d(64, 256, 3, 2, 1), block(256)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 300))


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Calls(lambda self, x: self.out(self.layer(x)[0]), layer=kind(64, 200, 2), out=nn.Linear(200, 64))


def encoder(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def language(*, tied: bool) -> nn.Module:
    model = Calls(
        lambda self, x: self.head(self.body(self.embedding(x))),
        embedding=nn.Embedding(1000, 128),
        body=encoder(128),
        head=nn.Linear(128, 1000, bias=False),
    )
    if tied:
        model.head.weight = model.embedding.weight
    return model


def checkpointed(*, reentrant: bool) -> nn.Module:
    return Calls(
        lambda self, x: self.last(checkpoint(self.middle, self.first(x), use_reentrant=reentrant)),
        first=nn.Linear(256, 256),
        middle=nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)),
        last=nn.Linear(256, 256),
    )


def autocast() -> nn.Module:
    def forward(self: Any, sample: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.layers(sample)
        return result

    layers = nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.Flatten(), nn.Linear(18432, 8)
    )
    return Calls(forward, layers=layers)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) / 16)


KINDS = {
    "convolutions": Kind(residual, normal(2, 3, 32, 32)),
    "channels last": Kind(
        lambda: residual().to(memory_format=torch.channels_last),
        lambda generator: normal(2, 3, 32, 32)(generator).contiguous(memory_format=torch.channels_last),
    ),
    "convolutions in 3 dimensions": Kind(
        lambda: nn.Sequential(nn.Conv3d(2, 64, 3), nn.ReLU(), nn.ConvTranspose3d(64, 64, 3)),
        normal(1, 2, 8, 8, 8),
    ),
    "grouped convolutions": Kind(
        lambda: nn.Sequential(nn.Conv1d(64, 256, 5), nn.Conv1d(256, 256, 65, groups=256)), normal(2, 64, 80)
    ),
    "LSTM": Kind(lambda: recurrent(nn.LSTM), normal(10, 3, 64)),
    "GRU": Kind(lambda: recurrent(nn.GRU), normal(10, 3, 64)),
    "transformer": Kind(lambda: encoder(256), normal(4, 64, 256)),
    "language model": Kind(lambda: language(tied=False), words(1000, 4, 32)),
    "tied weights": Kind(lambda: language(tied=True), words(1000, 4, 32)),
    "checkpoint": Kind(lambda: checkpointed(reentrant=False), normal(256, 256)),
    "reentrant checkpoint": Kind(
        lambda: checkpointed(reentrant=True), lambda generator: normal(256, 256)(generator).requires_grad_()
    ),
    "bfloat16": Kind(
        lambda: nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16(),
        lambda generator: normal(32, 256)(generator).bfloat16(),
        0.02,
    ),
    "autocast": Kind(autocast, normal(2, 8, 16, 16), 0.02),
    "complex": Kind(
        lambda: Calls(
            lambda self, x: torch.view_as_real(x.to(torch.complex64) @ self.weight),
            weight=parameter(128, 128, dtype=torch.complex64),
        ),
        normal(32, 128),
    ),
    "bilinear": Kind(
        lambda: Calls(lambda self, x: self.layer(x, x), layer=nn.Bilinear(32, 32, 64)), normal(8, 32)
    ),
    "bags": Kind(lambda: nn.Sequential(nn.EmbeddingBag(1000, 64), nn.Linear(64, 512)), words(1000, 16, 8)),
    "expanded gradients": Kind(
        lambda: Calls(
            lambda self, x: self.first.sum() * x.mean() + self.second.mean().reshape(1),
            first=parameter(256, 256),
            second=parameter(256, 256),
        ),
        normal(4, 4),
    ),
    "transposed parameters": Kind(
        lambda: Calls(
            lambda self, x: x @ self.weight @ self.weight.t(), weight=nn.Parameter(parameter(200, 256).t())
        ),
        normal(256, 256),
    ),
}


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def steps(name: str) -> None:
    kind, rank = KINDS[name], dist.get_rank()
    torch.manual_seed(1)
    alone = kind.make()
    wrapped = DistributedDataParallel(copy.deepcopy(alone))
    for step in range(STEPS):
        samples = [kind.sample(torch.Generator().manual_seed(100 * step + number)) for number in range(RANKS)]
        for model in (alone, wrapped):
            model.zero_grad()
        loss(wrapped(samples[rank])).backward()
        for sample in samples:
            (loss(alone(sample)) / RANKS).backward()
        for (where, found), expected in zip(wrapped.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                found.grad,
                expected.grad,
                rtol=kind.tolerance,
                atol=kind.tolerance / 10,
                msg=lambda text, where=where, step=step: f"{where}, step {step}: {text}",
            )


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_the_averages(name: str) -> None:
    run("processes", RANKS, steps, name)
