"""One rank of a training gets its batches late, so that `torchestra report` can say which, where, and why.

    torchestra run -n 4 examples/slow_rank.py            # and in another terminal, while it runs:
    torchestra report --html

With `torchestra run --record DIR` the report can be made afterwards: torchestra report --html --from DIR
"""

import argparse
import time
from itertools import pairwise

import torch

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel

SIZES = [784, 512, 512, 256, 10]


def load(delay_s: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of made-up pictures; on the slow rank, from what behaves like a slow disk."""
    time.sleep(delay_s)
    return torch.randn(32, SIZES[0]), torch.randint(SIZES[-1], (32,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=1, metavar="RANK", help="the slow rank (default: 1)")
    parser.add_argument("--delay", type=float, default=0.03, metavar="S", help="of its batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    delay_s = options.delay if dist.get_rank() == options.slow else 0.0
    layers = [layer for pair in pairwise(SIZES) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        batch, labels = load(delay_s)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
