"""Train a small network on handwritten digits, on any number of ranks.

    python -m torchestra run --nproc 2 examples/digits.py      # or torchrun --nproc-per-node 2 ...
    python examples/digits.py                                  # one rank

The data are scikit-learn's 1,797 scanned digits of 8 x 8 pixels, of which a fifth is kept for the test.
Every rank takes its share of every batch, so the training is the same, up to rounding, whatever the number
of ranks. At the end the ranks prove to each other that they hold the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.rendezvous import launch_environment

CLASSES = 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--require-accuracy", type=float, default=0.97, help="fail if the test gives less")
    parser.add_argument("--output", type=Path, default=Path("out/digits-loss.png"), help="the loss curve")
    return parser.parse_args()


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and others to test with: the same split in every run."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def shares(samples: int, batch_size: int, seed: int) -> Iterator[tuple[torch.Tensor, int]]:
    """For each batch of a shuffled epoch, the indices of this rank's share, and how many the batch has."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    for batch in order.split(batch_size):
        yield batch[dist.get_rank() :: dist.get_world_size()], len(batch)


def total(value: float) -> float:
    """The sum of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def train(model: DistributedDataParallel, settings: argparse.Namespace, console: Console) -> list[float]:
    """The mean loss of every epoch."""
    images, labels, _, _ = digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    curve = []
    for epoch in range(settings.epochs):
        started = time.perf_counter()
        summed = 0.0
        for share, batch_size in shares(len(labels), settings.batch_size, settings.seed + epoch):
            # Ranks may have shares of different sizes, even none. The gradients are averaged over the ranks,
            # so with this factor the result is the gradient of the mean over the batch.
            loss = nn.functional.cross_entropy(model(images[share]), labels[share], reduction="sum")
            optimizer.zero_grad()
            (loss * dist.get_world_size() / batch_size).backward()
            optimizer.step()
            summed += loss.item()
        curve.append(total(summed) / len(labels))
        speed = len(labels) / (time.perf_counter() - started)
        console.print(
            f"epoch {epoch + 1:3}/{settings.epochs}   loss {curve[-1]:.4f}   {speed:,.0f} samples/s"
        )
    return curve


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test digits that are recognised; each rank looks at some of them."""
    _, _, images, labels = digits()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    return total(right.item()) / len(labels)


def weights_are_identical(model: nn.Module) -> bool:
    """Compare a digest of all weights between the ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everybodys = torch.empty(dist.get_world_size(), len(mine), dtype=torch.uint8)
    dist.all_gather_into_tensor(everybodys, mine)
    return bool((everybodys == mine).all())


def draw(curve: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots()
    axes.plot(range(1, len(curve) + 1), curve, marker="o")
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log", title="Handwritten digits")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    settings = options()
    torch.set_num_threads(1)  # A rank's share of a batch is too small to be worth dividing further.
    if launch_environment().world_size is None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group()
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)

    started = time.perf_counter()
    curve = train(model, settings, console)
    seconds = time.perf_counter() - started
    score = accuracy(model)
    identical = weights_are_identical(model)
    spent = model.statistics()

    table = Table(show_header=False)
    table.add_row("ranks", str(dist.get_world_size()))
    table.add_row("training", f"{seconds:.1f} s, {spent.steps} steps")
    table.add_row("test accuracy", f"{score:.2%}")
    table.add_row("weights on all ranks", "bit-identical" if identical else "DIFFERENT")
    table.add_row("time in communication", f"{spent.communication_share:.1%} of forward and backward")
    if first and curve:
        draw(curve, settings.output)
        table.add_row("loss curve", str(settings.output))
    console.print(table)
    dist.destroy_process_group()

    if not identical:
        print("digits: the ranks ended with different weights", file=sys.stderr)
        return 1
    if score < settings.require_accuracy:
        print(f"digits: accuracy {score:.2%} is below {settings.require_accuracy:.2%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
