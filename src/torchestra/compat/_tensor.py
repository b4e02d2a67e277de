"""As ``torch.distributed._tensor``."""

from __future__ import annotations

from torchestra.device_mesh import (
    DeviceMesh,
    init_device_mesh,
)

__all__ = ["DeviceMesh", "init_device_mesh"]
