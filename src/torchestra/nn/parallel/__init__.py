"""Data parallel training: one model, copied to every rank, trained on different samples."""

from torchestra.nn.parallel.distributed import DistributedDataParallel
from torchestra.nn.parallel.statistics import DDPStatistics

__all__ = ["DDPStatistics", "DistributedDataParallel"]
