"""A multi-layer perceptron whose weights are divided among the ranks, compiled, and trained.

    python -m torchestra run --nproc 2 examples/compiled_tensor_parallel.py
    python -m torchestra run --nproc 4 examples/compiled_tensor_parallel.py --backend aot_eager

Rank r holds a slice of the first layer's outputs and the same slice of the second layer's inputs, and between
layers each rank holds some of the rows. So a block gathers the rows, and reduces and scatters its result;
backward, the two change places. Communication is part of the compiled graph: ``torch.compile`` sees
it, orders it, and computes meanwhile what does not need it.

Every rank also trains the undivided network, uncompiled, on all rows. At the end they are compared.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import torchestra as dist
import torchestra.functional as funcol
from torchestra.rendezvous import launch_environment


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a compiled perceptron with divided weights.")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256, help="divided among the ranks")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=96, help="divided among the ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate")
    parser.add_argument("--backend", default="inductor", help="of torch.compile, or none")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="fail if the weights differ by more")
    return parser.parse_args()


class Block(nn.Module):
    """Two linear layers, with what is added to them; undivided."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class DividedBlock(nn.Module):
    """This rank's share of a :class:`Block`. Takes and returns this rank's rows."""

    def __init__(self, whole: Block, mesh: dist.DeviceMesh) -> None:
        super().__init__()
        place, size = mesh.get_local_rank(), mesh.size()

        def share(tensor: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.detach().chunk(size, dim)[place].clone())

        self.mesh = mesh
        self.up, self.bias = share(whole.up.weight, 0), share(whole.up.bias, 0)
        self.down = share(whole.down.weight, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = funcol.all_gather_tensor_autograd(x, 0, self.mesh)
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(rows, self.up, self.bias))
        partial = torch.nn.functional.linear(hidden, self.down)
        return x + funcol.reduce_scatter_tensor_autograd(partial, "sum", 0, self.mesh)


def difference(whole: nn.Sequential, divided: nn.Sequential, mesh: dist.DeviceMesh) -> float:
    """By how much the weights of the two networks differ at most."""
    largest = 0.0
    for block, share in zip(whole, divided, strict=True):
        for weight, own, dim in (
            (block.up.weight, share.up, 0),
            (block.up.bias, share.bias, 0),
            (block.down.weight, share.down, 1),
        ):
            joined = funcol.all_gather_tensor(own, dim, mesh)
            largest = max(largest, (joined - weight).abs().max().item())
    return largest


def train(chosen: argparse.Namespace, mesh: dist.DeviceMesh) -> tuple[float, float, float]:
    """The first and the last loss, and by how much the weights differ in the end."""
    place, size = mesh.get_local_rank(), mesh.size()
    generator = torch.Generator().manual_seed(0)  # the same network and data on every rank
    whole = nn.Sequential(*(Block(chosen.width, chosen.hidden) for _ in range(chosen.blocks)))
    for weight in whole.parameters():
        nn.init.normal_(weight, std=chosen.hidden**-0.5, generator=generator)
    x, target = torch.randn(2, chosen.rows, chosen.width, generator=generator)
    divided = nn.Sequential(*(DividedBlock(block, mesh) for block in whole))
    my_x, my_target = x.chunk(size)[place], target.chunk(size)[place]
    compiled = divided
    if chosen.backend != "none":
        compiled = torch.compile(divided, fullgraph=True, backend=chosen.backend)
    optimizers = [torch.optim.SGD(each.parameters(), lr=chosen.lr) for each in (whole, divided)]
    losses = []
    for _ in range(chosen.steps):
        # The loss of all rows is the sum of the ranks' losses, and so are its gradients.
        my_loss = (compiled(my_x) - my_target).square().sum() / target.numel()
        my_loss.backward()
        loss = (whole(x) - target).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = funcol.all_reduce(my_loss.detach(), "sum", mesh)
        torch.testing.assert_close(total + 0, loss.detach(), rtol=1e-4, atol=1e-5)
        losses.append(loss.item())
    return losses[0], losses[-1], difference(whole, divided, mesh)


def main() -> int:
    chosen = options()
    launched = launch_environment()
    if launched.world_size is None:
        print("launch with: python -m torchestra run --nproc 2", sys.argv[0])
        return 2
    dist.init_process_group()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name in ("hidden", "rows"):
        if getattr(chosen, name) % mesh.size():
            raise SystemExit(f"--{name} must be a multiple of the number of ranks, {mesh.size()}")
    started = time.perf_counter()
    first, last, differs = train(chosen, mesh)
    if mesh.get_local_rank() == 0:
        print(
            f"{mesh.size()} ranks, {chosen.blocks} blocks of {chosen.width} x {chosen.hidden},"
            f" {chosen.backend}: loss {first:.4f} -> {last:.4f} in {chosen.steps} steps"
            f" ({time.perf_counter() - started:.1f} s, compiling included);"
            f" weights differ from the undivided network's by {differs:.1e} at most"
        )
    dist.destroy_process_group()
    return 0 if differs <= chosen.tolerance and last < first else 1


if __name__ == "__main__":
    sys.exit(main())
