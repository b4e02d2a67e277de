"""Data parallel training: one model, copied to every rank, trained on different samples."""

from torchestra.nn.parallel.buckets import compute_bucket_assignment_by_size
from torchestra.nn.parallel.buffer_hooks import BufferCommHookLocation
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType, GradBucket
from torchestra.nn.parallel.distributed import DistributedDataParallel
from torchestra.nn.parallel.mixed_precision import MixedPrecision
from torchestra.nn.parallel.reducer import Reducer
from torchestra.nn.parallel.statistics import DDPStatistics

__all__ = [
    "BufferCommHookLocation",
    "BuiltinCommHookType",
    "DDPStatistics",
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "Reducer",
    "compute_bucket_assignment_by_size",
]
