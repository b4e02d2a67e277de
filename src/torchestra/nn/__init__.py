"""Neural network modules whose ranks work together."""

from torchestra.nn import functional, parallel
from torchestra.nn.batchnorm import SyncBatchNorm
from torchestra.nn.remote_device import RemoteDevice
from torchestra.nn.remote_module import RemoteModule

__all__ = ["RemoteDevice", "RemoteModule", "SyncBatchNorm", "functional", "parallel"]
