"""torch's private names of a DeviceMesh, which libraries use, and the mesh that a ``with`` block is for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from torchestra.device_mesh.layout import Axes, offset, row_major
from torchestra.errors import NotInitializedError

_Mesh = TypeVar("_Mesh", bound="TorchMeshNames")


class TorchMeshNames:
    """Gives what a :class:`DeviceMesh` has torch's private names; ``with mesh:`` makes it the current one."""

    _names: tuple[str, ...] | None
    _group_names: tuple[str, ...]
    _coordinate: tuple[int, ...] | None
    _dimensions: tuple[Axes, ...]
    _ranks: Sequence[int]
    _rank: int

    def __enter__(self: _Mesh) -> _Mesh:
        """Make this the current mesh of the thread (``_mesh_resources.get_current_mesh()``)."""
        _mesh_resources.mesh_stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _mesh_resources.mesh_stack.pop()

    @property
    def _mesh_dim_names(self) -> tuple[str, ...] | None:
        return self._names

    @property
    def _dim_group_names(self) -> list[str]:
        return list(self._group_names)

    def _get_root_mesh(self: _Mesh) -> _Mesh:
        """Return the mesh that this one was cut from, or itself."""
        return self._base

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self.dimension(mesh_dim_name, "_get_mesh_dim_by_name")

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self._coordinate is not None

    def _sym_get_coordinate(self, index: int) -> int:
        """Return this rank's coordinate in the dimension of a number."""
        if self._coordinate is None:
            raise self._not_in_it()
        return self._coordinate[index]

    def _get_all_submeshes(self: _Mesh, mesh_dim_name: str) -> list[_Mesh]:
        """Return a mesh of one dimension for each row of ranks along a dimension.

        This rank has the group of its own row.

        Raises:
            UnknownDimensionError: there is no such dimension.
        """
        index = self.dimension(mesh_dim_name, "_get_all_submeshes")
        axes = self._dimensions[index]
        rows = []
        for first in range(len(self._ranks)):
            if offset(first, axes):
                continue
            ranks = self._ranks_along(axes, first)
            row = self._without_groups(self.device_type, ranks, row_major([len(ranks)]), (mesh_dim_name,))
            if self._group_names and self._rank in ranks:
                row._group_names = self._group_names[index : index + 1]
            rows.append(row)
        return rows

    # -- of the mesh

    @property
    def _base(self: _Mesh) -> _Mesh:
        raise NotImplementedError

    def dimension(self, mesh_dim: Any, name: str = "dimension") -> int:
        """Return the index of a dimension."""
        raise NotImplementedError

    def _not_in_it(self) -> Exception:
        raise NotImplementedError

    @property
    def device_type(self) -> str:
        """Return the type of device that the ranks compute on."""
        raise NotImplementedError

    def _ranks_along(self, axes: Axes, first: int | None = None) -> Sequence[int]:
        raise NotImplementedError

    @classmethod
    def _without_groups(cls: type[_Mesh], *layout: Any) -> _Mesh:
        raise NotImplementedError


class _MeshEnv(threading.local):
    """The meshes that a thread's ``with`` blocks are for, and older names of torch's."""

    def __init__(self) -> None:
        self.mesh_stack: list[Any] = []

    def get_current_mesh(self) -> Any:
        """Return the mesh of the innermost block.

        Raises:
            NotInitializedError: there is none.
        """
        if not self.mesh_stack:
            raise NotInitializedError("No device mesh is currently active!")
        return self.mesh_stack[-1]

    @staticmethod
    def get_root_mesh(device_mesh: TorchMeshNames) -> TorchMeshNames:
        """Return the mesh that a mesh was cut from, or itself."""
        return device_mesh._get_root_mesh()

    @staticmethod
    def _get_all_submeshes(device_mesh: TorchMeshNames, mesh_dim_name: str) -> Sequence[TorchMeshNames]:
        return device_mesh._get_all_submeshes(mesh_dim_name)


_mesh_resources = _MeshEnv()
