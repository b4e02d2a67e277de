"""Device meshes: drawn programs in torch's fake world and in torchestra's have the same outcomes."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared import SIDES, Outcome, differs, outcome, quiet
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import torchestra
from torchestra import compat

fake_pg = importlib.import_module("torch.testing._internal.distributed.fake_pg")
Call = tuple[str, int, tuple[Any, ...]]
SIZE = 8
SHAPES = [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4), (4,), (2, 2), (2, 3)]
NAMES = ("a", "b", "c")


# Where torch falls over itself, or refuses what is well-defined: calls by a rank that is not in the mesh, and
# calls on a mesh without names. docs/compat.md tells.
NOT_OUTSIDE = ("slice", "flatten", "get_group", "get_local_rank", "from_group", "from_groups")
NOT_UNNAMED = ("unflatten", "from_groups")


def is_compared(mesh: Any, call: str) -> bool:
    return not (
        (mesh.get_coordinate() is None and call in NOT_OUTSIDE)
        or (mesh.mesh_dim_names is None and call in NOT_UNNAMED)
    )


def table(mesh: Any) -> Any:
    return mesh.mesh.tolist()


def described(side: Any, value: Any) -> Any:
    """Return a mesh, a group, or a list of either as values that can be compared."""
    if isinstance(value, side.DeviceMesh):
        coordinate = value.get_coordinate()
        return (
            (tuple(value.shape), value.ndim, value.size(), value.mesh_dim_names, value.device_type),
            # A list in torch 2.10, a tuple later.
            (coordinate and tuple(coordinate), outcome(table, value), value.get_rank()),
            repr(value).partition(", stride")[0],  # which torch writes differently from version to version
            [described(side, each) for each in outcome(value.get_all_groups).value or []],
        )
    if isinstance(value, (list, tuple)):
        return [described(side, each) for each in value]
    return side.get_process_group_ranks(value) if isinstance(value, side.ProcessGroup) else value


def current(side: Any, mesh: Any) -> Any:
    known = importlib.import_module(f"{side.__name__}.device_mesh")._mesh_resources
    with mesh as inside, mesh:
        found = known.get_current_mesh() is mesh and inside is mesh
    return found, bool(outcome(known.get_current_mesh).errors)


CALLS: dict[str, Callable[..., Any]] = {
    "slice": lambda side, mesh, *names: mesh[names if len(names) != 1 else names[0]],
    "flatten": lambda side, mesh, name: mesh._flatten(name),
    "unflatten": lambda side, mesh, dim, sizes, names: mesh._unflatten(dim, sizes, names),
    "get_group": lambda side, mesh, dim: mesh.get_group(dim),
    "get_local_rank": lambda side, mesh, dim: mesh.get_local_rank(dim),
    "size": lambda side, mesh, dim: mesh.size(dim),
    "from_group": lambda side, mesh: side.DeviceMesh.from_group(mesh.get_group(), "cpu"),
    "from_groups": lambda side, mesh: side.DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    ),
    "equal": lambda side, mesh: (
        mesh == side.init_device_mesh("cpu", (8,)),
        mesh == mesh,
        hash(mesh) == hash(mesh),
    ),
    "submeshes": lambda side, mesh, name: mesh._get_all_submeshes(name),
    "root": lambda side, mesh: mesh._get_root_mesh(),
    "private": lambda side, mesh: (mesh._mesh_dim_names, len(mesh._dim_group_names)),
    "current": current,
}
if hasattr(SIDES[0].DeviceMesh, "_sym_get_coordinate"):  # torch 2.10 has neither
    CALLS["symbolic"] = lambda side, mesh: (
        mesh._is_current_rank_part_of_mesh(),
        mesh._sym_get_coordinate(0) if mesh._is_current_rank_part_of_mesh() else None,
    )


def run(side: Any, rank: int, shape: Any, names: Any, program: list[Call]) -> list[Any]:
    store = fake_pg.FakeStore() if side is SIDES[0] else torchestra.FakeStore()
    side.init_process_group("fake", store=store, rank=rank, world_size=SIZE)
    try:
        first = outcome(lambda: side.init_device_mesh("cpu", shape, mesh_dim_names=names))
        meshes, outcomes = [first.value] if not first.errors else [], []
        outcomes.append(Outcome(described(side, first.value), first.errors))
        for name, index, arguments in program if meshes else []:
            mesh = meshes[index % len(meshes)]
            if not is_compared(mesh, name):
                continue
            found = outcome(CALLS[name], side, mesh, *arguments)
            if isinstance(found.value, side.DeviceMesh):
                meshes.append(found.value)
            outcomes.append(Outcome(described(side, found.value), found.errors))
    finally:
        side.destroy_process_group()
    return outcomes


DIMENSIONS = st.sampled_from([None, 0, 1, 2, -1, 5, "a", "b", "c", "ab", "z"])
NAME = st.sampled_from(["a", "b", "c", "ab", "z"])
DRAWN: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "slice": st.lists(NAME, min_size=1, max_size=3).map(tuple),
    "flatten": st.tuples(st.sampled_from([None, "ab", "z", "a"])),
    "unflatten": st.tuples(
        st.sampled_from([0, 1, "a", "b"]),
        st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 2), (2,)]),
        st.sampled_from([("x", "y"), ("x",)]),
    ),
    "get_group": st.tuples(DIMENSIONS),
    "get_local_rank": st.tuples(DIMENSIONS),
    "size": st.tuples(st.sampled_from([None, 0, 1, 2])),
    "submeshes": st.tuples(NAME),
}
DRAWN |= {name: st.just(()) for name in CALLS if name not in DRAWN}


@given(
    rank=st.integers(0, SIZE - 1),
    shape=st.sampled_from(SHAPES),
    named=st.booleans(),
    program=st.lists(
        st.one_of([st.tuples(st.just(name), st.integers(0, 5), drawn) for name, drawn in DRAWN.items()]),
        min_size=2,
        max_size=10,
    ),
)
@settings(max_examples=60, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
def test_programs(rank: int, shape: tuple[int, ...], named: bool, program: list[Call]) -> None:
    names = NAMES[: len(shape)] if named else None
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = (run(side, rank, shape, names, program) for side in SIDES)
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert not differs(their, our), (
            f"{(rank, shape, names)} outcome {number}\n torch:      {their}\n torchestra: {our}"
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ("cpu", (2, 4), ("a",)),
        ("cpu", (2, 4), ("a", "a")),
        ("cpu", (3, 3), None),
        ("cpu:0", (8,), None),
    ],
)
def test_wrong_layouts(arguments: tuple[Any, ...]) -> None:
    device, shape, names = arguments

    def make(side: Any) -> list[Any]:
        return (
            run(side, 0, shape, names, [])
            if device == "cpu"
            else [outcome(side.init_device_mesh, device, shape)]
        )

    theirs, ours = map(make, SIDES)
    assert not differs(theirs, ours), (theirs, ours)
    assert isinstance(compat.DeviceMesh, type)
    assert torch.distributed.is_initialized() is False
