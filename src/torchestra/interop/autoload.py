"""What ``import torch`` runs of torchestra, by the entry point in the group ``torch.backends``.

It makes the backend's name known to torch.distributed and imports nothing that is not loaded already: the
engine is loaded when a group is made. Whatever goes wrong here, torch is imported all the same.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

BACKEND = "torchestra"
"""The name of the backend."""

__all__ = ["BACKEND", "autoload", "register"]


def autoload() -> None:
    """Register the backend if this torch has torch.distributed; a failure is only warned of."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return  # torch was built without it
    try:
        register()
    except Exception as error:
        warnings.warn(
            f'torchestra could not register its backend "{BACKEND}" with torch.distributed: {error!r}',
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Make ``"torchestra"`` known to torch.distributed as a backend; doing it again changes nothing.

    It serves tensors of the CPU, and those of CUDA where torch has that (through pinned memory). What other
    backends are the default for stays with them.
    """
    import torch
    from torch.distributed.distributed_c10d import Backend

    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    Backend.register_backend(BACKEND, _make, extended_api=True, devices=devices)


def _make(options: Any, backend_options: Any) -> Any:
    from torchestra.interop.torch_distributed.making import make

    return make(options, backend_options)
