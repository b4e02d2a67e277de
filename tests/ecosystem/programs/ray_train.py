"""Ray Train's TorchTrainer with two workers, each in a process of Ray's.

Argument: the number of epochs, which is 3 by default.
"""

import json
import os
import sys
import tempfile
import time

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import distributed, nn


def train(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(inputs, (inputs @ torch.randn(16, 4)).sin())
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    began, began_processor, losses = time.perf_counter(), time.process_time(), []
    for _ in range(config["epochs"]):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        distributed.all_reduce(loss.detach())
        losses.append(loss.item())
    seconds, processor_seconds = (
        time.perf_counter() - began,
        torch.tensor(time.process_time() - began_processor),
    )
    distributed.all_reduce(processor_seconds)
    if distributed.get_rank() == 0:
        result = {
            "ranks": distributed.get_world_size(),
            "losses": losses,
            "seconds": seconds,
            "processor_seconds": processor_seconds.item(),
        }
        with open(config["path"], "w") as file:
            json.dump(result, file)
    ray.train.report({"loss": losses[-1]})


def main():
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "result")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="warning")
    trainer = TorchTrainer(
        train,
        train_loop_config={"path": path, "epochs": int((*sys.argv[1:], 3)[0])},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=folder),
    )
    trainer.fit()
    with open(path) as file:
        print("RESULT", file.read())


main()
