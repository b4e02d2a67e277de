"""A small training with all that might depend on who computes a shard, for the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchestra as dist
from torchestra import elastic
from torchestra.optim import ZeroRedundancyOptimizer
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank

SAMPLES, FEATURES, BATCH = 50, 6, 20  # no number of shards divides a batch or an epoch
STEPS = 6


lock = threading.Lock()


class Network(nn.Module):
    """Have running statistics, and a parameter that only some shards use."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(9, 1)
        self.rarely = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]), persistent=False)

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(inputs))
        return outputs * self.rarely.sum() if index == 1 else outputs


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def make(
    seed: int, dropout: float, zero: bool = False
) -> tuple[Network, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make what is trained; ranks give different seeds, as they start on different weights.

    With ``zero`` the optimizer's state is divided between the ranks.
    """
    with lock:  # thread ranks share torch's random numbers
        torch.manual_seed(seed)
        network = Network(dropout)
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, lr=0.05)
    else:
        optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    return network, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def digest(state: elastic.State) -> dict[str, Any]:
    """Return everything that must be bit-identical; of a divided optimizer what this rank holds."""
    network, optimizer = state.modules[0], state.optimizers[0]
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    found = {name: each.detach().numpy().tobytes() for name, each in tensors.items()}
    numbers = {id(each): index for index, each in enumerate(optimizer.param_groups[0]["params"])}
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for parameter, each in local.state.items():
        found |= {f"{numbers[id(parameter)]}.{name}": value.numpy().tobytes() for name, value in each.items()}
    return found | {"lr": optimizer.param_groups[0]["lr"], "step": state.step, "loss": state.loss}


Hook = Callable[[elastic.Shard], object]


def train(
    shards: int,
    steps: int = STEPS,
    hook: Hook = lambda shard: None,
    dropout: float = 0.0,
    seed: int | None = None,
    zero: bool = False,
    **options: Any,
) -> tuple[dict[str, Any], elastic.State]:
    """Train on the calling rank; ``hook`` is called in the middle of every shard.

    Thread ranks share the random numbers of ``dropout``.
    """
    network, optimizer, scheduler = make(dist.get_rank() if seed is None else seed, dropout, zero)
    state = elastic.State(network, optimizer=optimizer, scheduler=scheduler, **options)
    go_on(state, shards, steps, hook)
    return digest(state), state


def go_on(
    state: elastic.State,
    shards: int,
    steps: int,
    hook: Hook = lambda shard: None,
    minimum: int = 1,
    update: Callable[[], object] | None = None,
) -> None:
    network = state.modules[0]
    inputs, targets = data()
    for shard in elastic.shards(state, steps, shards, seed=3, minimum=minimum, update=update):
        mine = shard.indices(SAMPLES, BATCH)
        hook(shard)
        if len(mine) > 1:  # BatchNorm needs two
            noise = 0.1 * torch.randn(inputs[mine].shape, generator=shard.generator)
            outputs = network(inputs[mine] + noise, shard.index)
            shard.backward(nn.functional.mse_loss(outputs, targets[mine]), len(mine))


def alone(shards: int, steps: int = STEPS, dropout: float = 0.0) -> dict[str, Any]:
    """Train as a single rank."""
    ended: list[dict[str, Any]] = []

    def body() -> None:
        with thread_rank(0, 1, HashStore()):
            dist.init_process_group()
            ended.append(train(shards, steps, dropout=dropout)[0])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return ended[0]
