"""``DeviceMesh``: ranks laid out in several dimensions, with a process group along each.

A mesh is a table of global ranks. Each of its dimensions is kept as *axes*, pairs of a length and a stride
in that table, as in a strided tensor: a slice takes some of the axes, a flattened dimension has several, an
unflattened one is cut in two. So a mesh of a million ranks costs no more than one of four, as long as the
table is a range.

The group along a dimension that this rank belongs to connects when it is first used (lazy.py). Until then
nothing is sent, and no call on a mesh waits for another rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Union

import torch

from torchestra.arguments.annotations import checked
from torchestra.device_mesh.layout import (
    Axes,
    check_device_type,
    check_names,
    check_order,
    check_ranks,
    coordinate,
    cut,
    index_of,
    is_ordered,
    joined,
    length,
    offset,
    row_major,
    table_of,
)
from torchestra.device_mesh.torch_names import TorchMeshNames
from torchestra.errors import InvalidArgumentError, UnknownDimensionError
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.world.init import (
    GroupTerms,
    default_group,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from torchestra.world.new_groups import make_group
from torchestra.world.registry import compact, current_world

Dimension = Union[int, str]
"""A dimension by number or name."""


class DeviceMesh(TorchMeshNames):
    """Ranks laid out in n dimensions, which may have names. To be made by every rank that is in it.

    Args:
        device_type: the device that the ranks compute on: ``"cpu"``, ``"cuda"``, …; kept, but not used.
        mesh: an n-dimensional table of global ranks (tensor, array or nested lists), the same on all ranks.
        mesh_dim_names: a name for each dimension.
        backend_override: backends by dimension, where they are not the default group's.

    If there is no default group, it is made with ``init_process_group()``.

    Raises:
        InvalidArgumentError: ranks repeat or do not exist, there are more of them than in the world, or names
            repeat or are not one for each dimension.
    """

    @checked
    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[str | None] | None = None,
    ) -> None:
        table = table_of(mesh)
        self._lay_out(device_type, compact(table.flatten().tolist()), row_major(table.shape), mesh_dim_names)
        self._join_groups(backend_override)

    @classmethod
    @checked
    def of_first_ranks(
        cls,
        device_type: str,
        shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[str | None] | None = None,
    ) -> DeviceMesh:
        """Make a mesh of this shape of ranks 0, 1, …, row by row; its cost does not grow with the number."""
        made = cls._without_groups(device_type, range(math.prod(shape)), row_major(shape), mesh_dim_names)
        made._join_groups(backend_override)
        return made

    @classmethod
    def _without_groups(cls, *layout: Any) -> DeviceMesh:
        """Make a mesh that has no groups yet, of the arguments of :meth:`_lay_out`."""
        made = cls.__new__(cls)
        made._lay_out(*layout)
        return made

    def _lay_out(
        self,
        device_type: str,
        ranks: Sequence[int],
        dimensions: Sequence[Axes],
        names: Sequence[str] | None,
        root: DeviceMesh | None = None,
    ) -> None:
        """Set everything but the groups."""
        if root is None:
            check_names(names, dimensions)
        check_device_type(device_type)
        if not is_initialized():
            init_process_group()
        check_ranks(ranks, get_world_size())
        self._device_type = device_type
        self._ranks = ranks
        self._dimensions = tuple(dimensions)
        self._shape = tuple(map(length, dimensions))
        self._names = tuple(names) if names else None
        self._root = root
        self._rank = get_rank()
        self._flattened: dict[str, DeviceMesh] = {}
        self._group_names: tuple[str, ...] = ()
        self._coordinate: tuple[int, ...] | None = None
        if self._rank in ranks:
            position = ranks.index(self._rank)
            self._coordinate = tuple(coordinate(position, axes) for axes in self._dimensions)

    def _join_groups(self, backends: Sequence[str | None] | None = None) -> None:
        """Enter a group for every dimension, which connects when it is used."""
        if backends is not None and len(backends) != self.ndim:
            raise InvalidArgumentError(
                "backend_override should have the same length as the number of mesh dimensions, but got"
                f" {len(backends)} and {self.ndim}."
            )
        if self._coordinate is None:
            return
        titles = self._names or [f"dim_{index}" for index in range(self.ndim)]
        self._group_names = tuple(
            map(self._join_group, self._dimensions, titles, backends or [None] * self.ndim)
        )

    def _join_group(self, axes: Axes, title: str, backend: str | None) -> str:
        """Enter the group along ``axes``; return its name."""
        ranks = self._ranks_along(axes)
        if ranks != range(get_world_size()):
            return make_group(
                ranks, GroupTerms(backend=backend), group_desc=f"mesh_{title}", deferred=True
            ).group_name
        if backend not in (None, default_group().backend):
            raise InvalidArgumentError(f"backend_override: {backend!r} differs from the default group's")
        return default_group().group_name

    def _ranks_along(self, axes: Axes, first: int | None = None) -> Sequence[int]:
        """Return the global ranks that differ from this one, or from the one at a position of the table that
        is first along ``axes``, only in their coordinate along ``axes``.
        """
        if first is None:
            position = self._ranks.index(self._rank)
            first = position - offset(position, axes)
        steps = joined(axes)
        if len(steps) == 1 and isinstance(self._ranks, range):
            count, stride = steps[0]
            return self._ranks[first : first + (count - 1) * stride + 1 : stride]
        positions = [first]
        for count, stride in steps:
            positions = [position + step * stride for position in positions for step in range(count)]
        return compact([self._ranks[position] for position in positions])

    # -- its dimensions

    @property
    def device_type(self) -> str:
        """Return the type of device that the ranks compute on."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the dimensions, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """Return how many dimensions there are."""
        return len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the dimensions."""
        return self._shape

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks: of one dimension, or of the whole mesh."""
        return math.prod(self._shape) if mesh_dim is None else self._shape[self.dimension(mesh_dim, "size")]

    @property
    def mesh(self) -> torch.Tensor:
        """The table of global ranks; of a slice, the one that this rank is in.

        Raises:
            InvalidArgumentError: it is a slice, and this rank is not in the mesh that it was cut from.
        """
        if self.size() == len(self._ranks):
            first = 0
        elif self._coordinate is None:
            raise InvalidArgumentError(
                "In order to get the mesh Tensor of a DeviceMesh it needs to either have all its original"
                " dimensions (e.g., no slicing) or it needs to contain the local rank"
            )
        else:
            first = self._ranks.index(self._rank)
            first -= sum(offset(first, axes) for axes in self._dimensions)
        all_axes = list(itertools.chain(*self._dimensions))
        lengths, strides = [count for count, _ in all_axes], [stride for _, stride in all_axes]
        ranks = self._ranks
        if isinstance(ranks, range):
            table = torch.arange(ranks.start, ranks.stop, ranks.step, dtype=torch.int, device="cpu")
        else:
            table = torch.tensor(ranks, dtype=torch.int, device="cpu")
        return table.as_strided(lengths, strides, first).reshape(self._shape)

    def dimension(self, mesh_dim: Dimension, name: str = "dimension") -> int:
        """Return the index of a dimension that the function ``name`` was given by name or index.

        Raises:
            UnknownDimensionError: there is none of that name or number.
        """
        return index_of(mesh_dim, self._names, self.ndim, name)

    # -- where this rank is

    def get_rank(self) -> int:
        """Return this rank's global rank."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: Dimension | None = None) -> int:
        """Return this rank's coordinate in a dimension, which may be left out if there is only one.

        That is its number within :meth:`get_group`, too.

        Raises:
            InvalidArgumentError: the dimension must be given, or this rank is not in the mesh.
        """
        if isinstance(mesh_dim, str) and mesh_dim in self._base._flattened:
            return self._base._flattened[mesh_dim].get_local_rank()
        index = self._only_dimension("get_local_rank", mesh_dim)
        if self._coordinate is None:
            raise self._not_in_it()
        return self._coordinate[index]

    def _only_dimension(self, name: str, mesh_dim: Dimension | None) -> int:
        if mesh_dim is not None:
            return self.dimension(mesh_dim, name)
        if self.ndim != 1:
            raise InvalidArgumentError(
                f"{name}: Found the DeviceMesh have {self.ndim} dimensions. Optional kwarg `mesh_dim` needs"
                " to be specified when device_mesh.ndim > 1."
            )
        return 0

    def _not_in_it(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"rank {self._rank} is not in {self!r}")

    # -- groups

    def group_name(self, mesh_dim: Dimension) -> str:
        """Return the name of the group along a dimension that this rank is in."""
        if not self._group_names:
            raise self._not_in_it()
        return self._group_names[self.dimension(mesh_dim, "group_name")]

    def get_group(self, mesh_dim: Dimension | None = None) -> ProcessGroup:
        """Return the group along a dimension that this rank is in. An only dimension may be left out.

        Raises:
            InvalidArgumentError: the dimension must be given, or this rank is not in the mesh.
            NotInitializedError: the group was destroyed.
        """
        if isinstance(mesh_dim, str) and mesh_dim in self._base._flattened:
            return self._base._flattened[mesh_dim].get_group()
        return current_world().group(self.group_name(self._only_dimension("get_group", mesh_dim)))

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the groups that this rank is in, one for each dimension."""
        return [self.get_group(index) for index in range(self.ndim)]

    # -- meshes made of this one

    @property
    def _base(self) -> DeviceMesh:
        """The mesh that this one was cut from, or itself."""
        return self if self._root is None else self._root

    def _derived(
        self, dimensions: Sequence[Axes], names: Sequence[str], group_names: Sequence[str]
    ) -> DeviceMesh:
        made = self._without_groups(self._device_type, self._ranks, dimensions, names, self._base)
        made._group_names = tuple(group_names)
        return made

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice along some dimensions that this rank is in: ``mesh["tp"]``, ``mesh["dp", "tp"]``.

        Names of flattened dimensions may be used, too.

        Raises:
            UnknownDimensionError: there is no such dimension, or they are not in the mesh's order.
            InvalidArgumentError: the mesh has no names, or dimensions overlap.
        """
        if self._names is None:
            raise InvalidArgumentError("Cannot slice a DeviceMesh without mesh_dim_names!")
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if wanted == self._names:
            return self
        known = {name: (self._dimensions[index], index, self) for index, name in enumerate(self._names)}
        if self._root is None:
            for name, flat in self._flattened.items():
                known[name] = (flat._dimensions[0], 0, flat)
        if not wanted or not all(name in known for name in wanted):
            raise UnknownDimensionError(
                f"Invalid mesh_dim_names {wanted} specified. Valid mesh_dim_names are {list(known)}."
            )
        dimensions = [known[name][0] for name in wanted]
        check_order(dimensions, wanted)
        groups = [
            mesh._group_names[index] for _, index, mesh in map(known.__getitem__, wanted) if mesh._group_names
        ]
        return self._derived(dimensions, wanted, groups)

    @checked
    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Make a mesh of one dimension of the same ranks; its name joins this one's with ``_`` unless given.

        The mesh that this one was cut from keeps it under that name.

        Raises:
            InvalidArgumentError: the mesh has no names, or the name is taken.
        """
        if self._names is None:
            raise InvalidArgumentError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self._names)
        if self._names == (name,):
            return self
        base = self._base
        if base._names is not None and name in base._names:
            raise InvalidArgumentError(
                f"{name} already exists for submesh of the {base}. Please specify another valid"
                " mesh_dim_name."
            )
        axes = joined(tuple(axis for dimension in self._dimensions for axis in dimension))
        found = base._flattened.get(name)
        if found is None:
            found = self._derived([axes], (name,), ())
            found._join_groups()
            base._flattened[name] = found
        elif found._dimensions != (axes,):
            raise InvalidArgumentError(
                f"Flatten mesh with mesh_dim_name {name} has been created before, Please specify another"
                " valid mesh_dim_name."
            )
        return found

    @checked
    def unflatten(
        self, dim: Dimension, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Cut one dimension into several, whose lengths and names are given.

        Raises:
            InvalidArgumentError: the lengths do not multiply to the dimension's, or names are missing or
                taken.
            UnknownDimensionError: there is no such dimension.
        """
        index = self.dimension(dim)
        if self._names is None:
            raise InvalidArgumentError("Cannot unflatten a DeviceMesh without mesh_dim_names!")
        if len(mesh_sizes) != len(mesh_dim_names):
            raise InvalidArgumentError("mesh_dim_names must have same length as mesh_sizes in _unflatten!")
        if math.prod(mesh_sizes) != self._shape[index]:
            raise InvalidArgumentError(
                f"The product of mesh_sizes={tuple(mesh_sizes)} is {math.prod(mesh_sizes)}, but the original"
                f" dimension at dim={index} has size {self._shape[index]}. These must be equal for unflatten"
                " to work correctly."
            )
        parts = cut(self._dimensions[index], mesh_sizes)
        dimensions = [*self._dimensions[:index], *parts, *self._dimensions[index + 1 :]]
        names = [*self._names[:index], *mesh_dim_names, *self._names[index + 1 :]]
        check_names(names, dimensions)
        replaced = self._derived(parts, mesh_dim_names, ())
        replaced._join_groups()
        groups = [*self._group_names[:index], *replaced._group_names, *self._group_names[index + 1 :]]
        return self._derived(dimensions, names, groups)

    @staticmethod
    @checked
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Make the mesh that has the dimensions of several, which were cut from the same mesh.

        Raises:
            InvalidArgumentError: they were not, have no names, or overlap.
        """
        first = meshes[0]
        if any(mesh._ranks != first._ranks for mesh in meshes):
            raise InvalidArgumentError("Cannot concatenate DeviceMeshes derived from different device meshs")
        if any(mesh._names is None for mesh in meshes):
            raise InvalidArgumentError("Cannot concatenate DeviceMeshes without mesh_dim_names!")
        dimensions = [axes for mesh in meshes for axes in mesh._dimensions]
        strides = sorted((axis for axes in dimensions for axis in axes), key=lambda axis: -axis[1])
        if not is_ordered(tuple(strides)):
            raise InvalidArgumentError(f"Cannot concatenate overlapping meshes: {list(meshes)}")
        names = [name for mesh in meshes for name in mesh._names or ()]
        return first._derived(dimensions, names, [name for mesh in meshes for name in mesh._group_names])

    # torch's names for them.
    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate

    @staticmethod
    @checked
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Make a mesh of existing groups: of one, or of one for each dimension of ``mesh``.

        Raises:
            InvalidArgumentError: ``mesh`` (or with several groups its names) is missing or does not fit.
        """
        groups = [group] if isinstance(group, (ProcessGroup, NonMember)) else list(group)
        if not groups:
            raise InvalidArgumentError("Expects at least one ProcessGroup to be passed")
        if isinstance(group, (ProcessGroup, NonMember)):
            ranks = get_process_group_ranks(group)
            if mesh is not None and torch.as_tensor(mesh).tolist() != ranks:
                raise InvalidArgumentError(f"Invalid mesh {mesh} for ProcessGroup with ranks {ranks}")
            mesh = ranks
        if mesh is None:
            raise InvalidArgumentError("Must pass mesh if passing multiple ProcessGroups")
        if len(groups) > 1 and mesh_dim_names is None:
            raise InvalidArgumentError("Must pass mesh_dim_names if passing multiple ProcessGroups")
        table = table_of(mesh)
        if table.ndim != len(groups):
            raise InvalidArgumentError(
                "Expects mesh with ndim equal to number of ProcessGroups but got mesh"
                f" {table.tolist()} and {len(groups)} ProcessGroups"
            )
        made = DeviceMesh._without_groups(
            device_type, compact(table.flatten().tolist()), row_major(table.shape), mesh_dim_names
        )
        if made._coordinate is not None:
            for each, axes in zip(groups, made._dimensions, strict=True):
                along = list(made._ranks_along(axes))
                if list(each.ranks) != along:
                    raise InvalidArgumentError(
                        f"from_group: {each!r} has ranks {list(each.ranks)}, but the mesh has {along} there"
                    )
            made._group_names = tuple(each.group_name for each in groups)
        return made

    # -- values

    def _identity(self) -> tuple[Any, ...]:
        return self._ranks, self._dimensions, self._device_type, self._names, self._rank

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, DeviceMesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        lengths: Any = self._shape
        if self._names is not None:
            named = [f"{name}={size}" for name, size in zip(self._names, self._shape, strict=True)]
            lengths = f"({', '.join(named)})"
        strides = tuple(
            axes[0][1] if len(axes) == 1 else tuple(stride for _, stride in axes) for axes in self._dimensions
        )
        return f"DeviceMesh({lengths}, {self._device_type!r}, stride={strides})"
