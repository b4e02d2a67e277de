"""Ranks laid out in several dimensions, with a process group along each."""

from __future__ import annotations

from torchestra.device_mesh.first_ranks import init_device_mesh
from torchestra.device_mesh.mesh import DeviceMesh

__all__ = ["DeviceMesh", "init_device_mesh"]
