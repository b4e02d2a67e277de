"""torch.distributed's module tree and spelling, private names included, for code that was written for it.

    import torchestra.compat as dist     # instead of: import torch.distributed as dist

Each name is an alias of the thing itself, or adapts names and shapes of arguments to it; docs/compat.md tells
which, and what is missing. Modules that have nothing of their own are rows of a table (aliases.py). The name
``"gloo"`` of a backend means torchestra's own engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from torchestra.communicator.work import Work
from torchestra.compat import aliases, distributed_c10d
from torchestra.compat.distributed_c10d import *  # noqa: F403
from torchestra.compat.remote_device import _remote_device
from torchestra.compat.rendezvous import rendezvous
from torchestra.device_mesh import DeviceMesh, init_device_mesh

aliases.install()

_Work = Work
_Backend = distributed_c10d.ProcessGroup

__all__ = [
    "DeviceMesh",
    "_Backend",
    "_Work",
    "_remote_device",
    "distributed_c10d",
    "init_device_mesh",
    "rendezvous",
]
__all__ += distributed_c10d.__all__

if not TYPE_CHECKING:  # so that type checkers know what there is not

    def __getattr__(name: str) -> object:
        """Import a module of this package when it is asked for, as torch.distributed has its own."""
        path = f"{__name__}.{name}"
        if not name.startswith("__") and importlib.util.find_spec(path) is not None:
            return importlib.import_module(path)
        raise AttributeError(
            f"torch.distributed.{name} has no counterpart in torchestra (docs/compat.md); TORCHESTRA_FOR=gloo"
            " runs a program on torchestra with all of torch.distributed (docs/interop.md)"
        )
