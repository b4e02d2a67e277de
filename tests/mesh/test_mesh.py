"""Meshes: shape, slices, flattening, who is where, groups along the dimensions, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
import torchestra.functional as funcol
from torchestra import DeviceMesh, init_device_mesh
from worlds import KINDS, run


@pytest.fixture
def rank_3_of_8() -> Iterator[None]:
    """Make this rank one of a fake world: what is tested here needs no other."""
    dist.init_process_group("fake", rank=3, world_size=8)
    yield
    dist.destroy_process_group()


alone = pytest.mark.usefixtures("rank_3_of_8")


@alone
def test_a_mesh_says_what_it_looks_like() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh.ndim == 3
    assert mesh.shape == (2, 2, 2)
    assert mesh.size() == 8
    assert [mesh.size(dim) for dim in (0, 1, -1)] == [2, 2, 2]
    assert mesh.device_type == "cpu"
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert torch.equal(mesh.mesh, torch.arange(8).view(2, 2, 2))
    assert mesh.get_rank() == 3
    assert mesh.get_coordinate() == (0, 1, 1)
    assert [mesh.get_local_rank(dim) for dim in (0, "dp", 2)] == [0, 1, 1]
    assert repr(mesh) == "DeviceMesh((pp=2, dp=2, tp=2), 'cpu', stride=(4, 2, 1))"
    plain = DeviceMesh("cuda", [[7, 3], [1, 0]])
    assert plain.mesh.tolist() == [[7, 3], [1, 0]]
    assert plain.get_coordinate() == (0, 1)
    assert repr(plain) == "DeviceMesh((2, 2), 'cuda', stride=(2, 1))"


@alone
@pytest.mark.parametrize("convert", [torch.tensor, np.array, list, lambda rows: torch.tensor(rows).t().t()])
def test_a_mesh_is_made_from_any_table(convert: Callable[[Any], Any]) -> None:
    assert DeviceMesh("cpu", convert([[0, 1], [2, 3]])).mesh.tolist() == [[0, 1], [2, 3]]


@alone
def test_slices() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh["tp"].mesh.tolist() == [2, 3]
    assert mesh["dp"].mesh.tolist() == [1, 3]
    assert mesh["pp"].mesh.tolist() == [3, 7]
    assert mesh["dp", "tp"].mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh["pp", "tp"].mesh.tolist() == [[2, 3], [6, 7]]
    assert mesh["pp", "dp", "tp"] is mesh
    assert mesh["dp", "tp"]["tp"] == mesh["tp"]
    assert mesh["dp", "tp"].get_coordinate() == (1, 1)
    assert mesh["dp"].mesh_dim_names == ("dp",)
    for dimension in ("pp", "dp", "tp"):
        assert mesh[dimension].get_group() is mesh.get_group(dimension)
        assert list(mesh.get_group(dimension).ranks) == mesh[dimension].mesh.tolist()


@alone
def test_flattening_and_cutting() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    flat = mesh["pp", "tp"].flatten()
    assert flat.mesh_dim_names == ("pp_tp",)
    assert flat.mesh.tolist() == [2, 3, 6, 7]
    assert flat.get_coordinate() == (1,)
    assert list(flat.get_group().ranks) == [2, 3, 6, 7]
    assert mesh["pp", "tp"]._flatten() is flat
    assert mesh["pp_tp"] == flat
    assert mesh.get_group("pp_tp") is flat.get_group()
    assert mesh["tp"].flatten("tp") == mesh["tp"]
    everything = mesh.flatten("world")
    assert everything.get_group() is dist.group.WORLD
    assert mesh["world"].size() == 8

    line = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    cut = line.unflatten("world", (2, 4), ("outer", "inner"))
    assert cut.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(group.ranks) for group in cut.get_all_groups()] == [[3, 7], [0, 1, 2, 3]]
    again = flat.unflatten(0, (2, 2), ("pp", "tp"))
    assert again.mesh.tolist() == [[2, 3], [6, 7]]
    joined = DeviceMesh.concatenate([mesh["pp"], mesh["tp"]])
    assert joined.mesh.tolist() == [[2, 3], [6, 7]]
    assert joined.get_all_groups() == [mesh.get_group("pp"), mesh.get_group("tp")]


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_slices_and_flattenings_are_those_of_the_table(shape: list[int], data: st.DataObject) -> None:
    """Against indexing of the table of ranks, seen from any rank, ranks in any order."""
    size = int(np.prod(shape))
    ranks = data.draw(st.one_of(st.just(list(range(size))), st.permutations(range(size))))
    rank = data.draw(st.integers(0, size - 1))
    names = tuple("abcd"[: len(shape)])
    taken = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    taken.sort()
    table = np.array(ranks).reshape(shape)
    place = tuple(int(index[0]) for index in np.nonzero(table == rank))
    index = tuple(slice(None) if dim in taken else place[dim] for dim in range(len(shape)))
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        mesh = DeviceMesh("cpu", table, mesh_dim_names=names)
        assert mesh.get_coordinate() == place
        part = mesh[tuple(names[dim] for dim in taken)]
        assert np.array_equal(part.mesh.numpy(), table[index])
        assert part.get_coordinate() == tuple(place[dim] for dim in taken)
        flat = part.flatten("flat") if part.ndim > 1 else part
        assert flat.mesh.tolist() == table[index].reshape(-1).tolist()
        for each in (mesh, part, flat):
            for dim, group in enumerate(each.get_all_groups()):
                along = np.moveaxis(each.mesh.numpy(), dim, -1).reshape(-1, each.shape[dim])
                assert list(group.ranks) in along.tolist()
                assert group.rank() == each.get_local_rank(dim)
        if part.ndim > 1:
            lengths = flat.unflatten("flat", part.shape, part.mesh_dim_names or ())
            assert lengths.mesh.tolist() == part.mesh.tolist()
    finally:
        dist.destroy_process_group()


@alone
def test_equal_meshes() -> None:
    first, second = (init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first == DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
    for other in (
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "xp")),
        init_device_mesh("cpu", (2, 4)),
        init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")),
        first["dp"],
        "a mesh",
    ):
        assert first != other
    assert len({first, second, first["dp"], second["dp"]}) == 2
    for copied in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        assert copied == first
        assert copied.get_group("tp") is first.get_group("tp")


@alone
def test_from_group() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_all_groups()
    line = DeviceMesh.from_group(tp, "cpu", mesh_dim_names=("tp",))
    assert line.mesh.tolist() == [0, 1, 2, 3]
    assert line.get_group("tp") is tp
    assert DeviceMesh.from_group(tp, "cpu", [0, 1, 2, 3]).get_local_rank() == 3
    again = DeviceMesh.from_group([dp, tp], "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
    assert again.get_all_groups() == [dp, tp]
    assert again["dp"].get_group() is dp
    for arguments, message in (
        (([], "cpu"), "at least one ProcessGroup"),
        (([dp, tp], "cpu"), "Must pass mesh if"),
        (([dp, tp], "cpu", mesh.mesh), "Must pass mesh_dim_names"),
        ((tp, "cpu", [0, 1]), "Invalid mesh"),
    ):
        with pytest.raises(ValueError, match=message):
            DeviceMesh.from_group(*arguments)
    with pytest.raises(ValueError, match="Expects mesh with ndim equal to number of ProcessGroups"):
        DeviceMesh.from_group([dp, tp], "cpu", [0, 1], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"has ranks .* but the mesh has"):
        DeviceMesh.from_group([tp, dp], "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))


def refused() -> list[tuple[Callable[[], Any], type[Exception], str]]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    plain = init_device_mesh("cpu", (2, 4))
    absent = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("a", "b"))
    flat = mesh.flatten("flat")
    return [
        (
            lambda: DeviceMesh("cpu", torch.arange(9)),
            RuntimeError,
            "Mesh should not be bigger than default world size 8",
        ),
        (lambda: DeviceMesh("cpu", [0, 0]), ValueError, "ranks must differ"),
        (lambda: DeviceMesh("cpu", [7, 8]), ValueError, "ranks must be from 0 to 7"),
        (lambda: DeviceMesh("cpu", []), ValueError, "at least one"),
        (
            lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "a")),
            RuntimeError,
            "Each mesh_dim_name must be unique",
        ),
        (
            lambda: init_device_mesh("cpu", (8,), mesh_dim_names=("a", "b")),
            RuntimeError,
            "should have same length",
        ),
        (lambda: init_device_mesh("cuda:0", (8,)), RuntimeError, "Device type with index is not supported"),
        (lambda: init_device_mesh("cpu", (8,), backend_override={"x": "fake"}), RuntimeError, "invalid keys"),
        (
            lambda: init_device_mesh(
                "cpu", (8,), mesh_dim_names=("x",), backend_override={"x": "fake", 0: "fake"}
            ),
            RuntimeError,
            "redundant dim index",
        ),
        (lambda: init_device_mesh("cpu", (2, 4), backend_override={1: "threads"}), ValueError, "differs"),
        (lambda: DeviceMesh("cpu", [0, 1], backend_override=("fake", "fake")), ValueError, "same length"),
        (lambda: plain["dp"], RuntimeError, "Cannot slice a DeviceMesh without mesh_dim_names"),
        (lambda: mesh["pp"], KeyError, "Invalid mesh_dim_names"),
        (lambda: mesh["tp", "dp"], KeyError, "ascending order"),
        (lambda: mesh["dp", "flat"], RuntimeError, "overlapping dim_names"),
        (lambda: mesh["dp"]["flat"], KeyError, "Invalid mesh_dim_names"),
        (mesh.get_group, RuntimeError, "Found the DeviceMesh have 2 dimensions"),
        (mesh.get_local_rank, RuntimeError, "Found the DeviceMesh have 2 dimensions"),
        (lambda: mesh.get_group("pp"), KeyError, "Mesh dimension 'pp' does not exist"),
        (lambda: plain.get_group("dp"), KeyError, "No `mesh_dim_names` found"),
        (lambda: mesh.get_group(2), ValueError, "mesh_dim is 2"),
        (lambda: absent.get_group("a"), ValueError, "rank 3 is not in DeviceMesh"),
        (lambda: absent.get_local_rank("a"), ValueError, "rank 3 is not in DeviceMesh"),
        (lambda: absent["a"].mesh, RuntimeError, "needs to contain the local rank"),
        (plain.flatten, RuntimeError, "Cannot flatten a DeviceMesh without mesh_dim_names"),
        (lambda: mesh["dp"].flatten("tp"), ValueError, "tp already exists for submesh"),
        (lambda: mesh["dp"].flatten("flat"), ValueError, "has been created before"),
        (lambda: mesh.unflatten("tp", (3, 2), ("a", "b")), ValueError, "The product of mesh_sizes"),
        (lambda: mesh.unflatten("tp", (2, 2), ("a",)), RuntimeError, "must have same length"),
        (lambda: mesh.unflatten("tp", (2, 2), ("dp", "b")), RuntimeError, "must be unique"),
        (lambda: mesh.unflatten("pp", (2, 2), ("a", "b")), KeyError, "does not exist"),
        (lambda: DeviceMesh.concatenate([mesh["dp"], flat]), RuntimeError, "overlapping meshes"),
        (lambda: DeviceMesh.concatenate([mesh["dp"], absent["a"]]), RuntimeError, "different device mesh"),
    ]


@alone
def test_what_is_refused() -> None:
    for call, error, message in refused():
        with pytest.raises(error, match=message):
            call()


@alone
def test_a_rank_that_is_not_in_a_mesh_may_look_at_it() -> None:
    mesh = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("a", "b"))
    assert mesh.get_coordinate() is None
    assert mesh["a"].shape == (2,)
    assert mesh.mesh.tolist() == [[4, 5], [6, 7]]


# -- with ranks


def sums_along_dimensions() -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = torch.tensor([float(dist.get_rank())])
    flat = mesh.flatten()
    return [
        *(funcol.all_reduce(mine, "sum", mesh[name]).tolist() for name in ("dp", "tp")),
        funcol.all_reduce(mine, "sum", flat).tolist(),
        funcol.permute_tensor(mine, [1, 0], mesh["tp"]).tolist(),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_a_mesh(kind: str) -> None:
    expected = [[[rank % 2 * 2.0 + 2], [rank // 2 * 4 + 1.0], [6.0], [float(rank ^ 1)]] for rank in range(4)]
    assert run(kind, 4, sums_along_dimensions) == expected


def only_some_ask() -> float:
    """A rank looks at its groups alone; and only some of a mesh's ranks make and use another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() == 0:
        assert [group.size() for group in mesh.get_all_groups()] == [2, 2]
        assert mesh.get_group("tp").rank() == 0
    if dist.get_rank() == 3:
        return 0.0
    others = DeviceMesh("cpu", [2, 0, 1])
    assert others.get_group().rank() == others.get_local_rank() == [1, 2, 0][dist.get_rank()]
    return funcol.all_reduce(torch.ones(1), "sum", others).item()


def test_nobody_waits_for_ranks_that_do_not_take_part() -> None:
    assert run("threads", 4, only_some_ask) == [3.0, 3.0, 3.0, 0.0]


def many() -> list[float]:
    mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
    mine = torch.tensor([float(dist.get_rank())])
    place = mesh.get_coordinate()
    assert place is not None
    assert tuple(mesh.get_local_rank(name) for name in "abc") == place
    return [funcol.all_reduce(mine, "sum", (mesh, dim)).item() for dim in range(3)]


def test_a_mesh_of_64_ranks() -> None:
    expected = [
        [
            sum(float(16 * i + 4 * b + c) for i in range(4)),
            sum(float(16 * a + 4 * i + c) for i in range(4)),
            sum(float(16 * a + 4 * b + i) for i in range(4)),
        ]
        for a, b, c in itertools.product(range(4), repeat=3)
    ]
    assert run("threads", 64, many) == expected


def without_a_default_group() -> tuple[int, ...]:
    assert not dist.is_initialized()
    return init_device_mesh("cpu", (2,)).get_coordinate() or ()


def test_a_mesh_makes_the_default_group_if_there_is_none() -> None:
    assert run("threads", 2, without_a_default_group, init=False) == [(0,), (1,)]
