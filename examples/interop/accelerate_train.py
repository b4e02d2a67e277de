"""Hugging Face accelerate on the CPU, with torchestra as the backend of torch.distributed.

    pip install 'torchestra[interop]'
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/interop/accelerate_train.py

The only line for torchestra makes the default group before the Accelerator would make one on Gloo. (Its
argument for a backend does not take one for the CPU.) ``--backend gloo`` gives the same losses.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import torchestra.interop.torch_distributed  # noqa: F401 - for where torch does not load entry points


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torchestra")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    distributed.init_process_group(arguments.backend)
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, (inputs @ torch.randn(16, 4)).sin())
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=32, shuffle=True)
    )

    started = time.perf_counter()
    for epoch in range(arguments.epochs):
        losses = []
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        loss = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}")
    backend = distributed.get_backend()
    seconds = time.perf_counter() - started
    accelerator.print(f"{accelerator.num_processes} ranks on {backend}: {seconds:.2f} s")
    accelerator.end_training()  # destroys the group


if __name__ == "__main__":
    main()
