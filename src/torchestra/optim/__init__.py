"""Optimizers whose ranks work together, or that step while backward goes on."""

from torchestra.optim.distributed import DistributedOptimizer
from torchestra.optim.functional import FunctionalOptimizer
from torchestra.optim.in_backward import apply_optimizer_in_backward, get_in_backward_optimizers
from torchestra.optim.post_local_sgd import PostLocalSGDOptimizer
from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "DistributedOptimizer",
    "FunctionalOptimizer",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "apply_optimizer_in_backward",
    "get_in_backward_optimizers",
]
