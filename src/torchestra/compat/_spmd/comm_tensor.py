"""As ``torch.distributed._spmd.comm_tensor``."""

from __future__ import annotations

from torchestra.functional.comm_tensor import (
    CommTensor,
    wait_comm,
)

_wait_comm = wait_comm

__all__ = ["CommTensor", "_wait_comm"]
