"""Groups of some ranks: who is in them, how they are numbered, and what the others see of them."""

from __future__ import annotations

import pytest
import torch

import torchestra as dist
from torchestra.errors import InvalidArgumentError
from worlds import KINDS, OP_SECONDS, run


def sum_over(group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def odd_memberships() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    memberships = [
        list(range(size)),
        [0],
        [size - 1],
        [0, size - 1],
        list(range(1, size)),
        list(range(0, size, 2)),
    ]
    groups = [dist.new_group(ranks) for ranks in memberships]
    for _ in range(2):
        for ranks, group in zip(memberships, groups, strict=True):
            assert dist.get_process_group_ranks(group) == ranks
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                assert (group.rank(), group.size()) == (ranks.index(rank), len(ranks))
                assert sum_over(group) == sum(peer + 1 for peer in ranks)
                assert dist.get_global_rank(group, 0) == ranks[0]
                assert dist.get_group_rank(group, ranks[-1]) == len(ranks) - 1
            else:
                assert isinstance(group, dist.NonMember)
                assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
    assert len({group.group_name for group in groups}) == len(groups)


@pytest.mark.parametrize("kind", KINDS)
def test_any_ranks_can_be_a_group(kind: str) -> None:
    run(kind, 4, odd_memberships)


def in_another_order() -> None:
    """Ranks of a group are numbered as they were given; roots are still global ranks."""
    rank = dist.get_rank()
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank == 1:
        return
    assert group.rank() == (0 if rank == 2 else 1)
    outputs = [torch.empty(1) for _ in range(2)]
    dist.all_gather(outputs, torch.tensor([float(rank)]), group=group)
    assert [output.item() for output in outputs] == [2.0, 0.0]
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, 2, group=group)
    assert tensor.item() == 2
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, group_src=1, group=group)
    assert tensor.item() == 0
    gathered = outputs if rank == 2 else None
    dist.gather(torch.tensor([rank + 10.0]), gathered, group=group)  # to rank 0 of the group, global rank 2
    assert gathered is None or [output.item() for output in outputs] == [12.0, 10.0]
    with pytest.raises(InvalidArgumentError, match=r"global rank 1 is not part of group '1'.* \[2, 0\]"):
        dist.broadcast(tensor, 1, group=group)


def test_groups_have_numbers_of_their_own() -> None:
    run("threads", 3, in_another_order)


def call_without_being_a_member() -> list[str]:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return []
    tensors = [torch.zeros(2), torch.zeros(2)]
    told = []
    for name, call in (
        ("all_reduce", lambda: dist.all_reduce(tensors[0], group=group)),
        ("reduce", lambda: dist.reduce(tensors[0], 0, group=group)),
        ("broadcast", lambda: dist.broadcast(tensors[0], 0, group=group, async_op=True)),
        ("all_gather", lambda: dist.all_gather(tensors, tensors[0], group=group)),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(tensors[0], tensors[1], group=group)),
        ("gather", lambda: dist.gather(tensors[0], tensors, 0, group=group)),
        ("scatter", lambda: dist.scatter(tensors[0], None, 0, group=group)),
        ("reduce_scatter", lambda: dist.reduce_scatter(tensors[0], tensors, group=group)),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(tensors[0], tensors[1], group=group)),
        ("all_to_all", lambda: dist.all_to_all(tensors, tensors, group=group)),
        ("all_to_all_single", lambda: dist.all_to_all_single(tensors[0], tensors[1], group=group)),
        ("barrier", lambda: dist.barrier(group)),
    ):
        with pytest.warns(
            UserWarning,
            match=rf"^Running {name} on global rank 1 which does not belong to .*group '1'.*\[0\]",
        ) as caught:
            assert call() is None
        told.append(caught[0].filename)
    for call in (lambda: dist.empty(3, group=group), lambda: dist.get_backend(group)):
        with pytest.raises(InvalidArgumentError, match="no member of group '1'"):
            call()
    dist.destroy_process_group(group)
    return told


def test_calls_of_who_is_not_in_the_group_warn_and_do_nothing() -> None:
    """In a process, because warnings are caught for all threads of one at once."""
    _, told = run("processes", 2, call_without_being_a_member)
    assert told == [__file__] * 12


def many_groups(rounds: int) -> None:
    for number in range(rounds):
        group = dist.new_group(timeout=50)
        assert sum_over(group) == 3
        assert group.group_name == str(number + 1)
        if number % 2:
            dist.destroy_process_group(group)


def test_groups_may_be_made_and_destroyed_again_and_again() -> None:
    run("threads", 2, many_groups, 30)


def only_members_call() -> None:
    """With use_local_synchronization the others need not even know."""
    rank = dist.get_rank()
    if rank == 2:
        return
    for _ in range(2):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        assert sum_over(group) == 3


def test_a_group_that_only_its_members_make() -> None:
    run("threads", 3, only_members_call)


def begin_again(times: int) -> None:
    for number in range(times):
        if number:
            dist.init_process_group(timeout=20)
        group = dist.new_group()
        assert group.group_name == "1"
        assert sum_over(dist.group.WORLD) == 6
        assert sum_over(group) == 6
        tensor = dist.ones(50_000)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        assert tensor[0] == 3


def test_a_world_may_begin_again_after_its_end() -> None:
    run("threads", 3, begin_again, 4)


def arenas_of_several_groups() -> None:
    """A tensor that lies in the arena of one group is an ordinary one for the others."""
    group = dist.new_group()
    for owner, user in ((group, dist.group.WORLD), (dist.group.WORLD, group)):
        tensor = dist.ones(500_000, group=owner)
        dist.all_reduce(tensor, group=user)
        assert tensor.sum() == 1_000_000


def test_tensors_of_one_group_in_operations_of_another() -> None:
    run("threads", 2, arenas_of_several_groups)


def describe() -> None:
    from datetime import timedelta

    world = dist.group.WORLD
    assert world is dist.GroupMember.WORLD
    assert dist.get_backend() == world.name() == "threads"
    assert repr(world) == f"<ProcessGroup 'default': rank {dist.get_rank()} of 2, backend 'threads'>"
    assert world.timeout == timedelta(seconds=OP_SECONDS)
    group = dist.new_group(timeout=timedelta(minutes=2), group_desc="pairs", backend="threads")
    assert (group.timeout, group.group_desc) == (timedelta(minutes=2), "pairs")
    group.set_timeout(3.5)
    assert group.timeout == timedelta(seconds=3.5)
    assert dist.get_node_local_rank() == dist.get_rank()


def test_what_a_group_tells_of_itself() -> None:
    run("threads", 2, describe)
