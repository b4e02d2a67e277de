"""A model in two pieces on two workers, trained with distributed autograd.

    python -m torchestra run --nproc 3 examples/pipeline.py

Worker "driver" has the data, "front" and "back" each have a piece of the network, and the driver has only
references to them. Every batch goes through as a few micro-batches, so that the front works at the next while
the back works at the one before. The backward pass finds its way back over the workers by itself, and each
worker updates its own piece. The data are scikit-learn's handwritten digits.

Two things are checked: that the gradients are, up to rounding, those of the same network in one piece, and
that the digits kept for the test are recognised.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

from torchestra import autograd, rpc
from torchestra.optim import DistributedOptimizer
from torchestra.rendezvous import launch_environment

WORKERS = ("driver", "front", "back")
CLASSES = 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a network that is spread over two workers.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--require-accuracy", type=float, default=0.96, help="fail if the test gives less")
    return parser.parse_args()


def front() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    )


def back() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class Stage:
    """A piece of the model, on its worker."""

    def __init__(self, piece: nn.Module) -> None:
        self.piece = piece

    def forward(self, inputs: rpc.RRef) -> torch.Tensor:
        """Return what the piece makes of inputs that lie on any worker."""
        return self.piece(inputs.to_here())

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.piece.parameters()]

    def gradients(self, context: int) -> list[torch.Tensor]:
        found = autograd.get_gradients(context)
        return [found[parameter] for parameter in self.piece.parameters()]


class Pipeline:
    """The driver's view of the model: references to its stages."""

    def __init__(self, pieces: list[nn.Module], micro_batches: int) -> None:
        self.stages = [
            rpc.remote(name, Stage, (piece,)) for name, piece in zip(WORKERS[1:], pieces, strict=True)
        ]
        self.micro_batches = micro_batches

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        first, last = self.stages
        outputs = []
        for part in inputs.chunk(self.micro_batches):
            between = first.remote().forward(
                rpc.RRef(part)
            )  # stays where it is made, until the back fetches it
            outputs.append(last.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameters(self) -> list[rpc.RRef]:
        return [parameter for stage in self.stages for parameter in stage.rpc_sync().parameters()]


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and others to test with."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def gradient_error(
    pipeline: Pipeline, pieces: list[nn.Module], images: torch.Tensor, labels: torch.Tensor
) -> float:
    """Return how far the pipeline's gradients of one batch are from those of the network in one piece."""
    whole = nn.Sequential(*pieces)
    nn.functional.cross_entropy(whole(images), labels).backward()
    with autograd.context() as context:
        autograd.backward(context, [nn.functional.cross_entropy(pipeline(images), labels)])
        found = [each for stage in pipeline.stages for each in stage.rpc_sync().gradients(context)]
    expected = [parameter.grad for parameter in whole.parameters()]
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def train(settings: argparse.Namespace, console: Console) -> tuple[float, float]:
    """The greatest error of a gradient before the training, and the test accuracy after it."""
    torch.manual_seed(settings.seed)
    images, labels, test_images, test_labels = digits()
    pieces = [front(), back()]
    pipeline = Pipeline(pieces, settings.micro_batches)
    error = gradient_error(pipeline, pieces, images[: settings.batch_size], labels[: settings.batch_size])
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameters(), lr=settings.lr)
    for epoch in range(1, settings.epochs + 1):
        started, summed = time.perf_counter(), 0.0
        for batch in torch.randperm(len(labels)).split(settings.batch_size):
            with autograd.context() as context:
                loss = nn.functional.cross_entropy(pipeline(images[batch]), labels[batch])
                autograd.backward(context, [loss])
                optimizer.step(context)
            summed += loss.item() * len(batch)
        speed = len(labels) / (time.perf_counter() - started)
        console.print(
            f"epoch {epoch:3}/{settings.epochs}   loss {summed / len(labels):.4f}   {speed:,.0f} samples/s"
        )
    right = (pipeline(test_images).argmax(dim=1) == test_labels).sum().item()
    return error, right / len(test_labels)


def main() -> int:
    settings = options()
    torch.set_num_threads(1)
    launch = launch_environment()
    if launch.rank is None or launch.world_size != len(WORKERS):
        print(f"pipeline: start with torchestra run --nproc {len(WORKERS)}", file=sys.stderr)
        return 2
    rpc.init_rpc(WORKERS[launch.rank])
    failure = ""
    if launch.rank == 0:
        console = Console()
        error, accuracy = train(settings, console)
        console.print(f"test accuracy {accuracy:.2%}; gradients within {error:.1e} of those of one piece")
        if error > 1e-5:
            failure = f"the gradients differ by {error:.1e}"
        elif accuracy < settings.require_accuracy:
            failure = f"accuracy {accuracy:.2%} is below {settings.require_accuracy:.2%}"
    rpc.shutdown()
    if failure:
        print(f"pipeline: {failure}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
