"""Ranks laid out in several dimensions, with a process group along each."""

from __future__ import annotations

from torchestra.mesh.device_mesh import DeviceMesh
from torchestra.mesh.first_ranks import init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
