"""The ways to name a group, what they stand for, and finding or making the group again."""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
import torchestra.functional as funcol
from torchestra.functional import expand_group, find_or_make_group
from torchestra.functional.groups import group_name, group_size
from torchestra.world.new_groups import make_group
from torchestra.world.registry import current_world
from worlds import KINDS, run


def tag_of(group: dist.ProcessGroup) -> str:
    return current_world().tag_of(group)


def lists_of_ranks() -> None:
    assert expand_group([0, 1, 2, 3]) == ("", [0, 1, 2, 3], 4)
    assert expand_group([0, 1, 2, 3], "bla") == ("bla", [0, 1, 2, 3], 4)
    assert expand_group([[0, 1], [2, 3]]) == ("", [0, 1, 2, 3], 2)
    assert expand_group([[0, 1], [2, 3]], "blu") == ("blu", [0, 1, 2, 3], 2)
    with pytest.raises(ValueError, match="group sizes must be identical found 1 and 3"):
        expand_group([[0], [1, 2, 3]])


def groups() -> None:
    world = dist.group.WORLD
    assert world is not None
    assert expand_group(world) == (tag_of(world), [0, 1, 2, 3], 4)
    assert expand_group(world, "bla")[0] == "bla"
    assert expand_group(world.group_name) == expand_group(world)
    mine = [make_group([0, 1]), make_group([2, 3])][dist.get_rank() // 2]
    assert isinstance(mine, dist.ProcessGroup)
    assert expand_group(mine) == (tag_of(mine), dist.get_process_group_ranks(mine), 2)
    alone = [make_group([rank], tag="own") for rank in range(4)][dist.get_rank()]
    assert isinstance(alone, dist.ProcessGroup)
    assert expand_group(alone) == ("own", [dist.get_rank()], 1)
    assert expand_group(alone, "bla")[0] == "bla"


def meshes() -> None:
    mesh = dist.DeviceMesh("cpu", torch.arange(4))
    assert expand_group(mesh) == (tag_of(mesh.get_group(0)), [0, 1, 2, 3], 4)
    table = dist.DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("rows", "columns"))
    for use in (expand_group, group_name):
        with pytest.raises(AssertionError, match="Only 1D mesh"):
            use(table)
    column, row = dist.get_rank() % 2, dist.get_rank() // 2 * 2
    assert expand_group((table, 0)) == (tag_of(table.get_group(0)), [column, column + 2], 2)
    assert expand_group((table, 1)) == (tag_of(table.get_group(1)), [row, row + 1], 2)
    assert expand_group((table, "columns")) == expand_group((table, 1)) == expand_group(table["columns"])


def bad_groups() -> None:
    mesh = dist.DeviceMesh("cpu", torch.arange(4))
    for bad, error, message in (
        ((mesh, 1.5), ValueError, "Invalid tuple for group"),
        ((mesh, 0, 0), ValueError, "Invalid tuple for group"),
        (4, TypeError, "Invalid type for group"),
        (None, ValueError, "Invalid type for group"),
        ((mesh, 3), ValueError, "mesh_dim is 3"),
        ([3, 4], ValueError, "rankset doesn't include|Cannot automatically"),
        ([], ValueError, "divisible"),
    ):
        with pytest.raises(error, match=message):
            funcol.all_reduce(torch.ones(1), "sum", bad)  # type: ignore[arg-type]
    with pytest.raises(dist.NotInitializedError, match="under the name 'nobody'"):
        funcol.all_reduce(torch.ones(1), "sum", "nobody")


def direct_groups() -> None:
    rank, store = dist.get_rank(), dist.group.WORLD.store  # type: ignore[union-attr]
    direct = dist.ProcessGroup(dist.PrefixStore("direct", store), rank, 4)
    assert funcol.all_reduce(torch.ones(1), "sum", direct).tolist() == [4.0]
    namesake = dist.ProcessGroup(dist.PrefixStore("another", store), rank, 4, name=direct.group_name)
    with pytest.raises(ValueError, match="a group named"):
        funcol.all_reduce(torch.ones(1), "sum", namesake)
    for group in (namesake, direct):
        dist.barrier(group)
        group.destroy()


def finding_and_making() -> None:
    made = find_or_make_group("blu", [0, 1, 2, 3], 2)
    assert made is [make_group([0, 1], tag="blu"), make_group([2, 3], tag="blu")][dist.get_rank() // 2]
    assert find_or_make_group(*expand_group([[0, 1], [2, 3]], "blu")) is made
    assert find_or_make_group(*expand_group(made)) is made
    assert find_or_make_group("", [0, 1, 2, 3], 4) is dist.group.WORLD
    with pytest.raises(ValueError, match="Cannot automatically create PG with empty tag"):
        find_or_make_group("", [0, 1, 2, 3], 2)
    with pytest.raises(ValueError, match=r"Ranks length \(3\) must be divisible by stride \(2\)"):
        find_or_make_group("bla", [0, 1, 2], 2)
    with pytest.raises(AssertionError, match="rankset doesn't include the current node"):
        find_or_make_group("bla", [(dist.get_rank() + 1) % 4], 1)
    total = funcol.all_reduce(torch.ones(1), "sum", [[0, 1], [2, 3]], "blu")
    assert total.tolist() == [2.0]


@pytest.mark.parametrize(
    "body", [lists_of_ranks, groups, meshes, bad_groups, direct_groups, finding_and_making]
)
def test_groups_in_threads(body) -> None:  # type: ignore[no-untyped-def]
    run("threads", 4, body)


def test_groups_in_processes() -> None:
    run("processes", 4, finding_and_making)


def sums_in_every_kind_of_group() -> list[list[float]]:
    rank = dist.get_rank()
    mesh = dist.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    kinds: list[funcol.Group] = [group, group.group_name, mesh["tp"], (mesh, 1), (mesh, "tp"), [0, 1, 2, 3]]
    assert [group_size(kind, group_name(kind)) for kind in kinds] == [2, 2, 2, 2, 2, 4]
    return [funcol.all_reduce(torch.tensor([float(rank)]), "sum", kind).tolist() for kind in kinds]


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_runs_in_the_group_it_is_given(kind: str) -> None:
    expected = [[[float(pair)]] * 5 + [[6.0]] for pair in (1, 1, 5, 5)]
    assert run(kind, 4, sums_in_every_kind_of_group) == expected
