"""Lightning's Trainer with its strategy "ddp" on the CPU; metrics logged over all ranks.

Argument: the number of epochs, which is 3 by default.
"""

import json
import sys
import time

import lightning
import torch
from torch import distributed, nn


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.losses = []

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch):
        self.log("validation", nn.functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self):
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        self.losses.append(self.trainer.callback_metrics["validation"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(16, 4)).sin())
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=int((*sys.argv[1:], 3)[0]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    began, began_processor = time.perf_counter(), time.process_time()
    trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=64))
    seconds, processor_seconds = (
        time.perf_counter() - began,
        torch.tensor(time.process_time() - began_processor),
    )
    distributed.all_reduce(processor_seconds)
    if trainer.is_global_zero:
        result = {
            "ranks": distributed.get_world_size(),
            "losses": model.losses,
            "seconds": seconds,
            "processor_seconds": processor_seconds.item(),
        }
        print("RESULT", json.dumps(result))


main()
