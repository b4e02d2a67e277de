"""torch.distributed's module tree and spelling, private names included, for code written for it.

    import torchestra.compat as dist     # instead of: import torch.distributed as dist

Each name is an alias of torchestra's own, or adapts the names and shapes of arguments to it; docs/compat.md
tells which, and what is missing. Modules without code of their own are rows of a table (aliases.py). The
backend name ``"gloo"`` means torchestra's own engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from torchestra.collectives.breakpoints import breakpoint  # noqa: A004
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
    "breakpoint",
    "distributed_c10d",
    "init_device_mesh",
    "rendezvous",
]
__all__ += distributed_c10d.__all__

if not TYPE_CHECKING:  # so that type checkers report missing names

    def __getattr__(name: str) -> object:
        """Import a module of this package on first access, as torch.distributed does."""
        path = f"{__name__}.{name}"
        if not name.startswith("__") and importlib.util.find_spec(path) is not None:
            return importlib.import_module(path)
        raise AttributeError(
            f"torch.distributed.{name} has no counterpart in torchestra (docs/compat.md); TORCHESTRA_FOR=gloo"
            " runs a program on torchestra with all of torch.distributed (docs/interop.md)"
        )
