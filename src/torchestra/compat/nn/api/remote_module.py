"""As ``torch.distributed.nn.api.remote_module``."""

from __future__ import annotations

from torchestra.nn.remote_module import PICKLED_ATTRIBUTES as _REMOTE_MODULE_PICKLED_ATTRIBUTES
from torchestra.nn.remote_module import RemoteModule

_RemoteModule = RemoteModule

__all__ = ["_REMOTE_MODULE_PICKLED_ATTRIBUTES", "RemoteModule", "_RemoteModule"]
