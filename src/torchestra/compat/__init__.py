"""torch.distributed's module tree and spelling, private names included, for code that was written for it.

    import torchestra.compat as dist     # instead of: import torch.distributed as dist

Each name is an alias of the thing itself, or adapts names and shapes of arguments to it; docs/compat.md tells
which, and what is missing. The backend's name ``"gloo"`` means torchestra's own engine.
"""

from __future__ import annotations

from torchestra.compat import device_mesh, distributed_c10d
from torchestra.compat.device_mesh import DeviceMesh, init_device_mesh
from torchestra.compat.distributed_c10d import *  # noqa: F403
from torchestra.compat.rendezvous import rendezvous
from torchestra.work import Work

_Work = Work
_Backend = distributed_c10d.ProcessGroup

__all__ = [
    "DeviceMesh",
    "_Backend",
    "_Work",
    "device_mesh",
    "distributed_c10d",
    "init_device_mesh",
    "rendezvous",
]
__all__ += distributed_c10d.__all__
