"""``init_device_mesh``: a mesh of the first ranks of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchestra.arguments.annotations import checked
from torchestra.device_mesh.layout import check_lengths
from torchestra.device_mesh.mesh import DeviceMesh
from torchestra.errors import InvalidArgumentError, shown


@checked
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, str] | None = None,
) -> DeviceMesh:
    """Make a mesh of the first ranks of the world, row by row. Every rank that is in it must call this.

    Args:
        device_type: as for :class:`DeviceMesh`, without an index.
        mesh_shape: the lengths of the dimensions.
        mesh_dim_names: a name for each.
        backend_override: backends by a dimension's number or name, if not the default group's.

    Raises:
        InvalidArgumentError: as :class:`DeviceMesh`.
    """
    if device_type and not device_type.isalpha():
        raise InvalidArgumentError(
            f"init_device_mesh: `device_type`: Device type with index is not supported but got"
            f" {shown(device_type)}. If you maintained a"
            " 'torch.device' object, it's recommended to pass in 'device.type'."
        )
    check_lengths(mesh_shape, "mesh_shape", "init_device_mesh")
    backends = _backends(backend_override, len(mesh_shape), mesh_dim_names)
    return DeviceMesh.of_first_ranks(device_type, tuple(mesh_shape), mesh_dim_names, backends)


def _backends(
    given: Mapping[int | str, str] | None, ndim: int, names: Sequence[str] | None
) -> list[str | None] | None:
    if given is None:
        return None
    left = dict(given)
    chosen: list[str | None] = []
    for index in range(ndim):
        keys = [key for key in (index, names[index] if names else None) if key is not None and key in left]
        if len(keys) > 1:
            raise InvalidArgumentError(
                f"Found redundant dim index {keys[0]} and name {keys[1]} in backend_override"
            )
        chosen.append(left.pop(keys[0]) if keys else None)
    if left:
        raise InvalidArgumentError(
            f"Found invalid keys in backend_override: got {list(left)}, expected integers in range"
            f" [0, {ndim}) or one of {tuple(names or ())}"
        )
    return chosen
