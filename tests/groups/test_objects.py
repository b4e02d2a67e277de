"""Collectives and messages of Python objects."""

from __future__ import annotations

import collections
import pickle
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ObjectTransferError,
    RankFailedError,
    UnpicklableObjectError,
)
from worlds import KINDS, await_note, leave_note, processes, run, store_barrier

Point = collections.namedtuple("Point", "x y")


class Weighted:
    """An object of a class of the program, with a tensor inside."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weighted) and torch.equal(self.weight, other.weight)

    __hash__ = None


class Explosive:
    """Pickles, but cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def assorted() -> list[Any]:
    return [
        {"key1": 3, "key2": 4, "key3": {"nested": True}},
        Weighted(torch.randn(3, 3, generator=torch.Generator().manual_seed(1))),
        "some text",
        [1, 2, True, "string", [4, 5, "nested"]],
        Point(1, (2.5, None)),
        None,
        Weighted(torch.arange(60_000)),
        list(range(3000)),
    ]


def the_same(found: Any, expected: Any) -> bool:
    return type(found) is type(expected) and found == expected


# -- every operation


def everybody_gets_everything() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things = assorted()
    group = dist.new_group(list(range(size - 1))) if size > 1 else None
    for shift in range(len(things)):
        mine = things[(rank + shift) % len(things)]
        found = [None] * size
        assert dist.all_gather_object(found, mine) is None
        expected = [things[(peer + shift) % len(things)] for peer in range(size)]
        assert all(map(the_same, found, expected))
        if isinstance(mine, (list, dict)):
            assert found[rank] is not mine
        if isinstance(group, dist.ProcessGroup):
            found = [None] * size  # longer than it must be
            dist.all_gather_object(found, mine, group=group)
            assert all(map(the_same, found[:-1], expected[:-1]))
            assert found[-1] is None


def one_gets_everything() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things = assorted()
    for shift in range(len(things)):
        root = shift % size
        mine = things[(rank + shift) % len(things)]
        found = [None] * size if rank == root else None
        chosen = {"dst": root} if shift % 3 else {"group_dst": root}
        dist.gather_object(mine, found, **({} if root == 0 else chosen))
        if found is not None:
            assert all(map(the_same, found, [things[(peer + shift) % len(things)] for peer in range(size)]))


def one_gives_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things = assorted()
    for root in range(size):
        objects = things if rank == root else [None] * len(things)
        chosen = {"src": root} if root % 2 else {"group_src": root}
        device = [None, "cpu", torch.device("cpu")][root % 3]
        dist.broadcast_object_list(objects, device=device, **({} if root == 0 else chosen))
        assert all(map(the_same, objects, assorted()))
        single = ["from here"] if rank == root else [0]
        dist.broadcast_object_list(single, root)
        assert single == ["from here"]
    dist.broadcast_object_list([])


def one_gives_to_each() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    things = assorted()
    for shift in range(len(things)):
        root = shift % size
        given = [things[(peer + shift) % len(things)] for peer in range(size)]
        found: list[Any] = ["before", "untouched"]
        chosen = {"src": root} if shift % 3 else {"group_src": root}
        dist.scatter_object_list(found, given if rank == root else None, **({} if root == 0 else chosen))
        assert the_same(found[0], given[rank])
        assert found[1] == "untouched"


def one_gives_to_another() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for source in range(size):
        target = (source + 1) % size
        if rank == source:
            dist.send_object_list(assorted(), target, device=torch.device("cpu"))
            dist.send_object_list(["more"], group_dst=target, use_batch=True)
        elif rank == target:
            objects: list[Any] = [0] * len(assorted())
            assert dist.recv_object_list(objects, source or None, device="cpu") == source
            assert all(map(the_same, objects, assorted()))
            more = [0]
            assert dist.recv_object_list(more, group_src=source, use_batch=True) == source
            assert more == ["more"]
        dist.barrier()


EVERY = [everybody_gets_everything, one_gets_everything, one_gives_to_all, one_gives_to_each]


@pytest.mark.parametrize("operation", [*EVERY, one_gives_to_another])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_arrive(kind: str, operation: Any) -> None:
    run(kind, 4 if kind == "threads" else 2, operation)


@pytest.mark.parametrize("operation", EVERY)
def test_alone(operation: Any) -> None:
    run("threads", 1, operation)


def in_a_subgroup() -> None:
    """Roots are global ranks, or the group's."""
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank in (0, 2):
        return
    objects = [rank]
    dist.broadcast_object_list(objects, src=3, group=group)
    assert objects == [3]
    objects = [rank]
    dist.broadcast_object_list(objects, group=group)
    assert objects == [1]
    found = [None] * 2 if rank == 3 else None
    dist.gather_object(rank, found, group_dst=1, group=group)
    assert found == ([1, 3] if rank == 3 else None)
    out = [None]
    dist.scatter_object_list(out, ["one", "three"] if rank == 1 else None, src=1, group=group)
    assert out == ["one" if rank == 1 else "three"]
    if rank == 1:
        dist.send_object_list([{"x": 1}], 3, group)
    else:
        objects = [None]
        assert dist.recv_object_list(objects, 1, group) == 1
        assert objects == [{"x": 1}]


def test_subgroups() -> None:
    run("threads", 4, in_a_subgroup)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)


def nested() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    return st.recursive(leaves, containers, max_leaves=20)


def exchange(things: list[Any], bulk: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    padded = [[thing, torch.full((bulk * peer,), peer)] for peer, thing in enumerate(things)]
    found = [None] * size
    dist.all_gather_object(found, padded[rank])
    scattered = [None]
    dist.scatter_object_list(scattered, padded if rank == 1 else None, src=1)
    for got, expected in zip([*found, *scattered], [*padded, padded[rank]], strict=True):
        assert got[0] == expected[0]
        assert torch.equal(got[1], expected[1])


@settings(max_examples=25, deadline=None)
@given(things=st.lists(nested(), min_size=3, max_size=3), bulk=st.sampled_from([0, 10, 5000]))
def test_any_objects_of_different_sizes(things: list[Any], bulk: int) -> None:
    run("threads", 3, exchange, things, bulk)


# -- large ones, and how many messages small ones take


def a_hundred_megabytes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 25_000_000
    objects: list[Any] = [None, None]
    if rank == 0:
        objects = [{"tensor": torch.arange(count, dtype=torch.float32)}, b"x" * 1_000_000]
    dist.broadcast_object_list(objects)
    assert objects[0]["tensor"].numel() == count
    assert objects[0]["tensor"][-1] == torch.tensor(float(count - 1))
    assert objects[1] == b"x" * 1_000_000
    found = [None] * size if rank == 1 else None
    dist.gather_object(np.full(count, rank, dtype=np.float32), found, dst=1)
    if found is not None:
        assert [array[-1] for array in found] == list(range(size))
        assert [array.nbytes for array in found] == [4 * count] * size
    del found
    if rank == 0:
        dist.send_object_list(objects[:1], 1)
    elif rank == 1:
        received = [None]
        dist.recv_object_list(received, 0)
        assert torch.equal(received[0]["tensor"], objects[0]["tensor"])


def test_objects_of_a_hundred_megabytes() -> None:
    run("processes", 2, a_hundred_megabytes)


def count_operations() -> None:
    """Small objects take one operation, whatever they are; a large tensor one more."""
    member = dist.group.WORLD.communicator.engine.context

    def taken(call: Any, *arguments: Any) -> int:
        before = member.load_word(at.SEQUENCE)
        call(*arguments)
        return member.load_word(at.SEQUENCE) - before

    rank, size = dist.get_rank(), dist.get_world_size()
    small = {"step": 3, "loss": 0.5, "names": ["a"] * 10, "tensor": torch.ones(10)}
    places = [None] * size
    assert taken(dist.all_gather_object, places, small) == 1
    assert taken(dist.broadcast_object_list, [small] * 2) == 1
    assert taken(dist.gather_object, small, places if rank == 0 else None) == 1
    assert taken(dist.scatter_object_list, [None], [small] * size) == 1
    large = torch.ones(100_000)
    assert taken(dist.all_gather_object, places, large) == 2
    assert taken(dist.all_gather_object, places, [large, b"x" * 3000] if rank else None) == 3


def test_small_objects_take_one_operation() -> None:
    run("threads", 2, count_operations)


# -- what goes wrong


def unpicklable(who: int, also_async: bool) -> None:
    """The rank whose object it is raises what pickling raises, the others hear of it, and all go on."""
    rank, size = dist.get_rank(), dist.get_world_size()

    class Local:
        pass

    bad = Local() if rank == who else "fine"
    pending = torch.ones(1)
    if also_async:
        dist.all_reduce(pending, async_op=True)
    calls = [
        lambda: dist.all_gather_object([None] * size, bad),
        lambda: dist.gather_object(bad, [None] * size if rank == 0 else None),
        lambda: dist.broadcast_object_list(["fine", bad], src=who),
        lambda: dist.scatter_object_list([None], ["fine"] * (size - 1) + [bad], src=who),
    ]
    for name, call in zip(("all_gather", "gather", "broadcast", "scatter"), calls, strict=True):
        if rank == who:
            with pytest.raises(
                UnpicklableObjectError, match=f"^{name}_object.* of type Local, .*Local"
            ) as own:
                call()
            assert isinstance(own.value, (TypeError, AttributeError, pickle.PicklingError))
            assert "\n" not in str(own.value)
        else:
            with pytest.raises(ObjectTransferError, match=f"{name}_object.* rank {who}: .*Local") as caught:
                call()
            assert caught.value.ranks == (who,)
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    assert pending.item() == (size if also_async else 1)


@pytest.mark.parametrize("also_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_pickled_leaves_nobody_waiting(kind: str, also_async: bool) -> None:
    run(kind, 3, unpicklable, 1, also_async)


def unpicklable_message() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match=r"^send_object_list: object 1 of 2, of type function, cannot be"):
            dist.send_object_list(["fine", lambda: None], 1)
        dist.send_object_list(["fine", "too"], 1)
    else:
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        assert objects == ["fine", "too"]


def test_a_message_that_cannot_be_pickled_is_not_sent() -> None:
    run("threads", 2, unpicklable_message)


def unreadable() -> None:
    """Only the rank where it cannot be unpickled raises; what can be is there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    with pytest.raises(
        ObjectTransferError, match=r"object from rank 1 cannot be unpickled on rank \d: ValueE"
    ) as e:
        dist.all_gather_object(found, Explosive() if rank == 1 else torch.full((20_000,), rank))
    assert isinstance(e.value.__cause__, ValueError)
    assert e.value.ranks == (1,)
    assert [item[0].item() for item in (found[0], found[2])] == [0, 2]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    if rank == 0:
        with pytest.raises(ObjectTransferError, match="rank 2 cannot be unpickled on rank 0"):
            dist.gather_object(rank, gathered)
        assert gathered == [0, 1, None]
    else:
        dist.gather_object(Explosive() if rank == 2 else rank)
    objects = ["first", Explosive()] if rank == 0 else ["kept", "kept too"]
    if rank == 0:
        dist.broadcast_object_list(objects)
    else:
        with pytest.raises(ObjectTransferError, match="object 1 of 2 from rank 0 cannot be unpickled"):
            dist.broadcast_object_list(objects)
        assert objects == ["kept", "kept too"]


def unreadable_by_one() -> None:
    rank = dist.get_rank()
    out = ["kept"]
    if rank == 2:
        with pytest.raises(ObjectTransferError, match="from rank 1 cannot be unpickled on rank 2"):
            dist.scatter_object_list(out, src=1)
        assert out == ["kept"]
    else:
        dist.scatter_object_list(out, None if rank == 0 else ["a", "b", Explosive()], src=1)
        assert out == ["ab"[rank]]
    dist.barrier()


def test_an_object_that_cannot_be_unpickled_concerns_only_who_gets_it() -> None:
    run("threads", 3, unreadable)
    run("threads", 3, unreadable_by_one)


def lists_of_different_lengths() -> None:
    rank = dist.get_rank()
    objects = ["a", "b"] if rank == 0 else ["kept"]
    if rank == 0:
        dist.broadcast_object_list(objects)
        dist.send_object_list(objects, 1)
    else:
        with pytest.raises(ValueError, match="has 1 places on rank 1, but rank 0 sent 2 objects"):
            dist.broadcast_object_list(objects)
        with pytest.raises(ValueError, match="has 1 places on rank 1, but rank 0 sent 2 objects"):
            dist.recv_object_list(objects, 0)
        assert objects == ["kept"]
    dist.barrier()


def test_lists_that_do_not_fit() -> None:
    run("threads", 2, lists_of_different_lengths)


def wrong_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank
    places = [None] * size
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: dist.all_gather_object([None], 1),
            ValueError,
            "must have a place for each of the group's 2",
        ),
        (lambda: dist.all_gather_object((None, None), 1), TypeError, "`object_list` must be a list"),
        (lambda: dist.gather_object(1, None, dst=rank), ValueError, "must be specified on destination rank"),
        (lambda: dist.gather_object(1, [None], dst=rank), ValueError, "a place for each of the group's 2"),
        (lambda: dist.gather_object(1, places, dst=other), ValueError, "must NOT be specified on non-dest"),
        (lambda: dist.gather_object(1, places, 0, group_dst=0), ValueError, "not both"),
        (lambda: dist.scatter_object_list([], [1, 2]), ValueError, "to be a list of size at least 1"),
        (
            lambda: dist.scatter_object_list(None, [1, 2]),
            ValueError,
            "`scatter_object_output_list` must be a list",
        ),
        (
            lambda: dist.scatter_object_list([1], None, src=rank),
            ValueError,
            "source rank must provide non-None",
        ),
        (
            lambda: dist.scatter_object_list([1], [1], src=rank),
            ValueError,
            "one object for each of the group's 2",
        ),
        (lambda: dist.broadcast_object_list(["a"], 9), ValueError, "not part of group"),
        (lambda: dist.broadcast_object_list("a"), TypeError, "must be a list"),
        (
            lambda: dist.broadcast_object_list(["a"], 0, device="nowhere"),
            TypeError,
            "`device` must be a torch.device",
        ),
        (lambda: dist.broadcast_object_list(["a"], 0, device="cuda:99"), ValueError, "no such device here"),
        (lambda: dist.broadcast_object_list(["a"], 0, device="meta"), ValueError, "no such device here"),
        (lambda: dist.broadcast_object_list(["a"], 0, device=[1]), TypeError, "`device` must be a device"),
        (
            lambda: dist.send_object_list(["a"], rank),
            ValueError,
            "Invalid destination rank: destination rank sh",
        ),
        (
            lambda: dist.recv_object_list(["a"], rank),
            ValueError,
            "Invalid source rank: source rank should not",
        ),
        (lambda: dist.send_object_list(["a"]), ValueError, "give `dst` or `group_dst`"),
        (lambda: dist.send_object_list("a", other), TypeError, "must be a list"),
        (lambda: dist.recv_object_list((0,), other), TypeError, "must be a list"),
        (lambda: dist.all_gather_object(places, 1, group=3), TypeError, "must be a ProcessGroup"),
    ]
    for call, error, phrase in cases:
        with pytest.raises(error, match=phrase) as caught:
            call()
        assert isinstance(caught.value, (InvalidArgumentError, InvalidArgumentTypeError))
    dist.all_gather_object(places, rank)
    assert places == [0, 1]


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    run("threads", 2, wrong_calls)


def outside() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0])
    if rank == 0:
        return
    places = ["kept"]
    for name, call in {
        "all_gather_object": lambda: dist.all_gather_object(places, 1, group=group),
        "gather_object": lambda: dist.gather_object(1, group=group),
        "broadcast_object_list": lambda: dist.broadcast_object_list(places, 0, group=group),
        "scatter_object_list": lambda: dist.scatter_object_list(places, group=group),
        "send_object_list": lambda: dist.send_object_list(places, 0, group=group),
    }.items():
        with pytest.warns(UserWarning, match=name):
            assert call() is None
    with pytest.warns(UserWarning, match="recv_object_list"):
        assert dist.recv_object_list(places, 0, group=group) == -1
    assert places == ["kept"]


@pytest.mark.filterwarnings("always")
def test_who_is_not_in_the_group_is_warned() -> None:
    run("threads", 2, outside)


def be_killed_with_objects_under_way() -> tuple[int, ...]:
    store_barrier()
    if dist.get_rank() == 2:
        leave_note("here")
        await_note("never")
    with pytest.raises(RankFailedError) as caught:
        dist.all_gather_object([None] * 3, {"large": torch.ones(200_000)})
    return caught.value.ranks


def test_a_rank_that_is_killed_is_named_to_who_waits_for_its_object() -> None:
    with processes(3, be_killed_with_objects_under_way) as world:
        world.await_file("here")
        world.signal(2, signal.SIGKILL)
        zero, one, _ = world.finish()
    assert zero.result() == one.result() == (2,)


def test_in_a_fake_world() -> None:
    dist.init_process_group("fake", rank=1, world_size=3)
    try:
        found = [None] * 3
        dist.all_gather_object(found, {"mine": torch.ones(50_000)})
        assert [item["mine"].numel() for item in found] == [50_000] * 3
        objects, out = ["kept"], ["kept"]
        dist.broadcast_object_list(objects, 0)
        dist.scatter_object_list(out, src=0)
        dist.send_object_list(objects, 0)
        dist.recv_object_list(objects, 0)
        dist.gather_object("mine", dst=2)
        assert objects == out == ["kept"]
        dist.scatter_object_list(out, [1, 2, 3], src=1)
        assert out == [2]
    finally:
        dist.destroy_process_group()
