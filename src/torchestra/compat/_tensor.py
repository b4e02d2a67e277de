"""As ``torch.distributed._tensor``."""

from __future__ import annotations

from torchestra.mesh import (
    DeviceMesh,
    init_device_mesh,
)

__all__ = ["DeviceMesh", "init_device_mesh"]
