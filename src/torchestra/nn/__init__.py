"""Neural network modules whose ranks work together."""

from torchestra.nn import parallel
from torchestra.nn.batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "parallel"]
