"""Convert the ways to give the ranks that take part into a group's name, which operators use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, Union, cast

import torch

from torchestra.arguments.annotations import checked, is_integer
from torchestra.communicator.comm_debug import add_operators, modes_on
from torchestra.device_mesh import DeviceMesh
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, InvalidShapeError, shown
from torchestra.process_group import NonMember, ProcessGroup
from torchestra.tensors.contiguity import TENSORS, contiguity_problem
from torchestra.world.init import default_group
from torchestra.world.new_groups import make_group
from torchestra.world.registry import current_world

__all__ = ["Group", "expand_group", "find_or_make_group", "group_name", "group_size"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The errors for these parameters are in torch's words.
_CHECKED_BY_THEMSELVES = ("group", "output_split_sizes", "input_split_sizes")

Group = Union[ProcessGroup, str, DeviceMesh, tuple[DeviceMesh, Union[int, str]], list[int], list[list[int]]]
"""The ranks that take part: a group, or its name; a mesh of one dimension; a mesh and a dimension; global
ranks (a group of them, with the tag, must exist or is made); lists of equally many ranks, of which this rank
is in one.
"""


def checked_unless_traced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Check arguments as :func:`checked` does, except in calls that Dynamo traces.

    A parameter ``group`` is checked in torch's words.
    """
    first = next(iter(inspect.signature(function).parameters))
    own = [name for name in inspect.signature(function).parameters if name in _CHECKED_BY_THEMSELVES]
    refusing = checked(function, own)
    index = list(inspect.signature(function).parameters).index("group") if "group" in own else None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if modes_on():
            add_operators(torch.ops.torchestra)
        if index is not None and (index < len(args) or "group" in kwargs):
            _check_group(args[index] if index < len(args) else kwargs["group"], function.__name__)
        _check_memory(args[0] if args else kwargs.get(first), first, function.__name__)
        return refusing(*args, **kwargs)

    return call


def _check_memory(tensors: object, parameter: str, name: str) -> None:
    """Refuse tensors that torch itself cannot copy, or not completely.

    Fake and meta tensors are for tracing, and torch's own wrappers hold their memory in other tensors.
    """
    for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
        if isinstance(tensor, torch.masked.MaskedTensor):  # which takes no operators but torch's own
            raise InvalidArgumentError(
                f"{name}: `{parameter}` is a MaskedTensor; give its .get_data() and .get_mask() one by one"
            )
        if not isinstance(tensor, torch.Tensor) or tensor.__class__ not in TENSORS or not tensor.is_cpu:
            continue
        if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            continue
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{name}: `{parameter}` has unsupported layout {tensor.layout}: only dense tensors are sent"
            )
        if not tensor._is_zerotensor() and (missing := contiguity_problem(tensor)):
            raise InvalidArgumentError(f"{name}: `{parameter}` {missing}")


def _check_group(group: object, name: str) -> None:
    """Refuse a value that does not stand for a group."""
    if isinstance(group, ProcessGroup):
        if group.communicator.closed:
            group.communicator.queue.refuse_if_closed(name)
        return
    if isinstance(group, (str, DeviceMesh)):
        return
    if isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh) or not _is_dimension(group[1]):
            raise InvalidArgumentError(
                f"{name}: Invalid tuple for group must be (DeviceMesh, int), got {shown(group)}"
            )
        return
    if isinstance(group, NonMember):
        raise InvalidArgumentError(f"{name}: `group`: functional collectives: this rank is {group!r}")
    if not isinstance(group, list) or not all(
        is_integer(rank) or (isinstance(rank, list) and all(map(is_integer, rank))) for rank in group
    ):
        raise InvalidArgumentTypeError(
            f"{name}: Invalid type for group, must be one of list of ranks, ProcessGroup, DeviceMesh,"
            f" (DeviceMesh, int) or the name of a group; got {shown(group)}"
        )


def _is_dimension(dimension: object) -> bool:
    return isinstance(dimension, str) or is_integer(dimension)


@checked_unless_traced
def expand_group(group: Group, tag: str = "") -> tuple[str, list[int], int]:
    """Resolve a group to its tag, all global ranks that are named, and how many make one group.

    The three find a group again (:func:`find_or_make_group`).

    Raises:
        InvalidShapeError: a mesh of several dimensions is given without a dimension.
        InvalidArgumentError: lists of ranks have different lengths, or the group is of none of these kinds.
    """
    if isinstance(group, list):
        if group and isinstance(group[0], list):
            sets = group
            if len({len(ranks) for ranks in sets}) != 1:
                raise InvalidArgumentError(
                    f"group sizes must be identical found {' and '.join(str(len(ranks)) for ranks in sets)}"
                )
            return tag, [rank for ranks in sets for rank in ranks], len(sets[0])
        ranks = cast("list[int]", group)
        return tag, ranks, len(ranks)
    found = current_world().group(group) if isinstance(group, str) else _group_object(group)
    return tag or current_world().tag_of(found), list(found.ranks), found.size()


def _group_object(group: ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str]) -> ProcessGroup:
    if isinstance(group, ProcessGroup):
        return group
    mesh, dimension = _mesh_and_dimension(group)
    return mesh.get_group(dimension)


def _mesh_and_dimension(group: Any) -> tuple[DeviceMesh, int | str]:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidShapeError(
                "Only 1D mesh is supported, pass in (DeviceMesh, int) together if mesh > 1D;"
                f" this one has {group.ndim} dimensions"
            )
        return group, 0
    if isinstance(group, tuple):
        if len(group) == 2 and isinstance(group[0], DeviceMesh) and isinstance(group[1], (int, str)):
            return group[0], group[1]
        raise InvalidArgumentError("Invalid tuple for group must be (DeviceMesh, int)")
    if isinstance(group, NonMember):
        raise InvalidArgumentError(f"functional collectives: this rank is {group!r}")
    raise InvalidArgumentTypeError(
        "Invalid type for group, must be one of list of ranks, ProcessGroup, DeviceMesh, (DeviceMesh, int) or"
        f" the name of a group; got {type(group).__name__}"
    )


@checked
def find_or_make_group(tag: str, ranks: Sequence[int], size: int) -> ProcessGroup:
    """Return this rank's group with a tag among ``ranks``, of which every ``size`` consecutive form one.

    It is made if there is none, which needs no other rank (they meet when they first use it).

    Raises:
        InvalidArgumentError: there is none and the tag is empty, or ``size`` does not divide their number.
        InvalidShapeError: this rank is not among ``ranks``.
    """
    if not ranks or len(ranks) % size:
        raise InvalidArgumentError(
            f"find_or_make_group: Ranks length ({len(ranks)}) must be divisible by stride ({size}), got"
            f" `ranks` = {shown(ranks)}"
        )
    mine = default_group().rank()
    sets = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    own = next((each for each in sets if mine in each), None)
    if own is None:
        raise InvalidShapeError(
            f"find_or_make_group: `ranks`: rankset doesn't include the current node: rank {mine} is not in"
            f" {shown(sets)}"
        )
    found = current_world().find(own, tag)
    if found is not None:
        return found
    if not tag:
        raise InvalidArgumentError(
            "find_or_make_group: Cannot automatically create PG with empty tag: there is no untagged"
            f" group of ranks {list(own)};"
            " make one with new_group(), or give a tag"
        )
    made = make_group(sorted(own), tag=tag, deferred=True)
    assert isinstance(made, ProcessGroup)
    return made


def constant_while_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo call a function without tracing it.

    ``torch.compiler.assume_constant_result`` does the same, but would load the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_traced
def _name_by_ranks(group: list[Any], tag: str) -> str:
    return find_or_make_group(*expand_group(group, tag)).group_name


@constant_while_traced
def _size_by_name(name: str) -> int:
    return current_world().group(name).size()


def group_name(group: Group, tag: str = "") -> str:
    """Return the name of a group, however it is given. With lists of ranks, ``tag`` tells groups apart."""
    if isinstance(group, str):
        return group
    if isinstance(group, list):
        return cast(str, _name_by_ranks(group, tag))
    if isinstance(group, ProcessGroup):
        if not torch.compiler.is_dynamo_compiling():
            current_world().check_name(group)
        return group.group_name
    mesh, dimension = _mesh_and_dimension(group)
    return mesh.group_name(dimension)


def group_size(group: Group, name: str) -> int:
    """Return how many ranks the group of this name has."""
    if isinstance(group, ProcessGroup):
        return group.size()
    if isinstance(group, (DeviceMesh, tuple)):
        mesh, dimension = _mesh_and_dimension(group)
        return mesh.size(mesh.dimension(dimension))
    return cast(int, _size_by_name(name))
