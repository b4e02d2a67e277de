"""Lightning on the CPU, with torchestra as the backend of torch.distributed.

    pip install 'torchestra[interop]'
    OMP_NUM_THREADS=1 python examples/interop/lightning_train.py --ranks 2

Lightning starts the other ranks itself. ``--backend gloo`` gives the same losses.
"""

from __future__ import annotations

import argparse
import time

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

import torchestra.interop.torch_distributed  # noqa: F401 - for where torch does not load entry points


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def on_train_start(self) -> None:
        self.started = time.perf_counter()

    def on_train_end(self) -> None:
        seconds = time.perf_counter() - self.started
        self.print(f"{self.trainer.world_size} ranks on {distributed.get_backend()}: {seconds:.2f} s")

    def on_train_epoch_end(self) -> None:
        loss = self.all_gather(torch.stack(self.losses)).mean().item()
        self.print(f"epoch {self.current_epoch}: loss {loss:.6f}")
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="torchestra")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, (inputs @ torch.randn(16, 4)).sin())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=arguments.ranks,
        strategy=DDPStrategy(process_group_backend=arguments.backend),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
