"""torchmetrics synchronised over ranks: sums, lists of uneven lengths, and lists that are empty on a rank.

Argument: how many times, 20 by default.
"""

import json
import sys
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
    began, began_processor, found = time.perf_counter(), time.process_time(), []
    for _ in range(int((*sys.argv[1:], 20)[0])):
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
    seconds, processor_seconds = (
        time.perf_counter() - began,
        torch.tensor(time.process_time() - began_processor),
    )
    dist.all_reduce(processor_seconds)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert all(each == found for each in everywhere)
    if rank == 0:
        result = {
            "ranks": dist.get_world_size(),
            "losses": found,
            "seconds": seconds,
            "processor_seconds": processor_seconds.item(),
        }
        print("RESULT", json.dumps(result))
    dist.destroy_process_group()


main()
