"""torchmetrics synchronised over ranks: sums, lists of uneven lengths, and lists that are empty on a rank."""

import json
import time

import torch
import torch.distributed as dist
import torchmetrics
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    number = 20 + 7 * rank
    scores = torch.rand(number, 5, generator=generator)
    labels = torch.randint(0, 5, (number,), generator=generator)
    began, found = time.perf_counter(), []
    for _ in range(20):
        accuracy, confusion = MulticlassAccuracy(5), MulticlassConfusionMatrix(5)
        area, mean = BinaryAUROC(), torchmetrics.MeanMetric()
        correlation, all_of = torchmetrics.PearsonCorrCoef(), torchmetrics.CatMetric()
        accuracy.update(scores, labels)
        confusion.update(scores, labels)
        area.update(scores[:, 0], (labels == 0).long())
        mean.update(scores.mean())
        correlation.update(scores[:, 0], scores[:, 1])
        all_of.update(scores[: 3 + rank, 0])
        metrics = (accuracy, confusion, area, mean, correlation, all_of)
        found = [value for metric in metrics for value in metric.compute().double().flatten().tolist()]
    seconds = time.perf_counter() - began
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert all(each == found for each in everywhere)
    if rank == 0:
        print("RESULT", json.dumps({"ranks": dist.get_world_size(), "losses": found, "seconds": seconds}))
    dist.destroy_process_group()


main()
