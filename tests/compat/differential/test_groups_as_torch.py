"""Groups: the same calls on two ranks, in torch's Gloo group and in torchestra's, have the same outcomes.

Both groups live in the same two processes, so a drawn program is two short runs in processes that are warm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from compared import SIDES, compare_calls, differs, outcome
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Call = tuple[str, tuple[Any, ...]]
SIZE = 2  # as many ranks as compare_calls has


def tensor(side: Any, rank: int, dtype: str, length: int) -> torch.Tensor:
    return (torch.arange(length) * 3 + 2 * rank + 1).to(getattr(torch, dtype))


def all_reduce(side: Any, rank: int, dtype: str, length: int, op: str, async_op: bool) -> Any:
    values = tensor(side, rank, dtype, length)
    work = side.all_reduce(values, getattr(side.ReduceOp, op), async_op=async_op)
    return (work and (work.wait(), work.is_completed(), work.is_success())), values.tolist()


def broadcast(side: Any, rank: int, dtype: str, length: int, src: Any) -> Any:
    values = tensor(side, rank, dtype, length)
    return side.broadcast(values, src), values.tolist()


def reduce(side: Any, rank: int, dtype: str, length: int, dst: Any, op: str) -> Any:
    values = tensor(side, rank, dtype, length)
    returned = side.reduce(values, dst, getattr(side.ReduceOp, op))
    return returned, values.tolist() if rank == dst else None  # torch leaves others' undefined


def all_gather(side: Any, rank: int, dtype: str, length: int, count: int) -> Any:
    parts = [torch.zeros(length, dtype=getattr(torch, dtype)) for _ in range(count)]
    return side.all_gather(parts, tensor(side, rank, dtype, length)), [part.tolist() for part in parts]


def all_gather_into_tensor(side: Any, rank: int, dtype: str, length: int, count: int) -> Any:
    whole = torch.zeros(length * count, dtype=getattr(torch, dtype))
    return side.all_gather_into_tensor(whole, tensor(side, rank, dtype, length)), whole.tolist()


def reduce_scatter_tensor(side: Any, rank: int, dtype: str, length: int, op: str) -> Any:
    part = torch.zeros(length, dtype=getattr(torch, dtype))
    whole = tensor(side, rank, dtype, length * SIZE)
    return side.reduce_scatter_tensor(part, whole, getattr(side.ReduceOp, op)), part.tolist()


def scatter(side: Any, rank: int, length: int, src: int, lists: int) -> Any:
    values = torch.zeros(length)
    mine = [tensor(side, number, "float32", length) for number in range(SIZE)] if lists >> rank & 1 else None
    return side.scatter(values, mine, src), values.tolist()


def gather(side: Any, rank: int, length: int, dst: int, lists: int) -> Any:
    into = [torch.zeros(length) for _ in range(SIZE)] if lists >> rank & 1 else None
    returned = side.gather(tensor(side, rank, "float32", length), into, dst)
    return returned, into and [each.tolist() for each in into]


def all_to_all_single(side: Any, rank: int, dtype: str, length: int) -> Any:
    into = torch.zeros(length * SIZE, dtype=getattr(torch, dtype))
    return side.all_to_all_single(into, tensor(side, rank, dtype, length * SIZE)), into.tolist()


def objects(side: Any, rank: int, src: int) -> Any:
    told: list[Any] = [rank, {"rank": rank}]
    side.broadcast_object_list(told, src)
    every: list[Any] = [None] * SIZE
    side.all_gather_object(every, (rank, "text"))
    mine: list[Any] = [None]
    side.scatter_object_list(mine, [f"for {number}" for number in range(SIZE)] if rank == src else None, src)
    gathered: list[Any] | None = [None] * SIZE if rank == src else None
    side.gather_object({rank}, gathered, src)
    return told, every, mine, gathered


def messages(side: Any, rank: int, dtype: str, length: int, tag: int, any_source: bool) -> Any:
    values = tensor(side, rank, dtype, length)
    if rank == 0:
        return side.send(values, 1, tag=tag)
    source = side.recv(values, None if any_source else 0, tag=tag)
    work = side.irecv(torch.zeros(0), 1) if length < 0 else None
    return source, work, values.tolist()


def known(side: Any, rank: int) -> Any:
    c10d = side.distributed_c10d
    world = side.group.WORLD
    return (
        (side.get_rank(), side.get_world_size(), side.get_backend(), side.is_initialized()),
        (side.get_process_group_ranks(world), side.get_global_rank(world, 1), side.get_group_rank(world, 0)),
        (world.rank(), world.size(), world.name(), world.group_name == c10d._get_process_group_name(world)),
        (side.get_rank(world), side.get_world_size(world), len(c10d._pg_map), c10d._pg_group_ranks[world]),
        (c10d._rank_not_in_group(world), c10d._get_group_size(None), isinstance(world, side.ProcessGroup)),
        (str(c10d._get_pg_default_device(world)), c10d._get_object_coll_device(world)),
        side.barrier(),
        side.monitored_barrier(timeout=timedelta(seconds=20)),
    )


def some_ranks(side: Any, rank: int, ranks: Any) -> Any:
    group = side.new_group(ranks)
    outside = group is side.GroupMember.NON_GROUP_MEMBER
    if outside:
        found: Any = [outcome(side.get_rank, group), outcome(side.get_world_size, group)]
    else:
        values = torch.ones(2)
        side.all_reduce(values, group=group)
        found = [side.get_process_group_ranks(group), values.tolist(), side.get_rank(group)]
        side.destroy_process_group(group)
        found.append(outcome(side.get_rank, group))
    side.barrier()
    return outside, found


def wrong(side: Any, rank: int, name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(side, name)(*arguments)


def works(side: Any, rank: int) -> Any:
    values = torch.ones(2)
    work = side.all_reduce(values, async_op=True)
    future = work.get_future()
    future.wait()
    waited = work.wait(timedelta(0))
    received = torch.zeros(1)
    message = side.isend(torch.ones(1), 1) if rank == 0 else side.irecv(received, 0)
    message.wait()
    ops = [side.P2POp(side.isend if rank == 0 else side.irecv, torch.ones(1), 1 - rank)]
    batch = [each.wait() for each in side.batch_isend_irecv(ops)]
    return (
        waited,
        work.is_completed(),
        values.tolist(),
        received.tolist(),
        isinstance(work, side.Work),
        len(batch),
    )


def told_to_all(side: Any, rank: int, failing: int) -> Any:
    """``collective_utils``: values and exceptions that all ranks get."""
    together = importlib.import_module(f"{side.__name__}.collective_utils")
    world = side.group.WORLD

    def made() -> str:
        if failing >> rank & 1:
            raise KeyError(rank)
        return f"of {rank}"

    gathered = outcome(together.all_gather, made, "stage", world)
    told = [outcome(partial(together.broadcast, made, rank=root, pg=world)) for root in range(SIZE)]
    types: list[Any] = [None] * SIZE
    mixed = outcome(together.all_gather_object_enforce_type, world, types, "text" if rank and failing else 1)
    alone = outcome(together.broadcast, "value"), outcome(together.all_gather, made)
    # Where a function raises, torch's all_gather falls over its own `raise ... from`.
    return gathered.value, bool(gathered.errors), told, mixed, types, alone


def functional(side: Any, rank: int, name: str, dtype: str, length: int, dim: int, op: str) -> Any:
    """A functional collective, by a group's name, its ranks, or the group; its input stays as it was."""
    fc = importlib.import_module(f"{side.__name__}._functional_collectives")
    world = side.group.WORLD
    given = tensor(side, rank, dtype, length * SIZE).reshape(SIZE, length)
    if dim:
        given = given.t().contiguous()
    made = {
        "all_reduce": lambda: fc.all_reduce(given, op, world),
        "all_gather_tensor": lambda: fc.all_gather_tensor(given, dim, [0, 1]),
        "reduce_scatter_tensor": lambda: fc.reduce_scatter_tensor(given, op, dim, world),
        "all_to_all_single": lambda: fc.all_to_all_single(given, None, None, world),
        "broadcast": lambda: fc.broadcast(given, 1, world),
        "all_reduce_coalesced": lambda: fc.all_reduce_coalesced([given, given], op, world)[1],
        "all_gather_into_tensor_coalesced": lambda: fc.all_gather_into_tensor_coalesced([given], world)[0],
    }[name]()
    waited = fc.wait_tensor(made)
    # Along another dimension torch 2.10 always waits by itself, later torch where it has to copy.
    kind = (name == "all_gather_tensor" and dim != 0) or isinstance(made, fc.AsyncCollectiveTensor)
    return kind, tuple(waited.shape), str(waited.dtype), waited.tolist(), given.tolist()


def with_options(side: Any, rank: int, kind: str, root: int, op: str, async_op: bool) -> Any:
    """A method of the group, with an options object; and what the object says of itself."""
    c10d = side.distributed_c10d
    options = getattr(c10d, f"{kind}Options")()
    told = [
        str(getattr(options, name))
        for name in ("rootRank", "rootTensor", "asyncOp")
        if hasattr(options, name)
    ]
    told.append(options.timeout == timedelta(milliseconds=-1))
    values, whole, world = tensor(side, rank, "float32", SIZE), torch.zeros(SIZE * SIZE), side.group.WORLD
    if hasattr(options, "rootRank"):
        options.rootRank = root
    if hasattr(options, "reduceOp"):
        options.reduceOp = getattr(side.ReduceOp, op)
    options.timeout, options.asyncOp = timedelta(seconds=20), async_op
    work = {
        "Allreduce": lambda: world.allreduce([values], options),
        "Broadcast": lambda: world.broadcast([values], options),
        "Reduce": lambda: world.reduce([values], options),
        "Allgather": lambda: world.allgather([list(whole.split(SIZE))], [values], options),
        "ReduceScatter": lambda: world.reduce_scatter([whole[:1]], [list(values.split(1))], options),
        "AllToAll": lambda: world.alltoall_base(whole[:SIZE], values, [], [], options),
        "Barrier": lambda: world.barrier(options),
    }[kind]()
    done = work.wait()
    mine = values.tolist() if kind != "Reduce" or rank == root else None  # torch leaves others' undefined
    return told, options.timeout, done, mine, whole.tolist()


CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in [
        *(all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor),
        *(
            scatter,
            gather,
            all_to_all_single,
            objects,
            messages,
            known,
            some_ranks,
            functional,
            told_to_all,
            with_options,
            wrong,
            works,
        ),
    ]
}


def compare(program: list[Call]) -> None:
    compare_calls([(CALLS[name], arguments) for name, arguments in program])


DTYPES = st.sampled_from(["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8"])
LENGTHS = st.integers(0, 5)
OPS = st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"])
RANKS = st.integers(0, 1)
DRAWN: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "all_reduce": (DTYPES, LENGTHS, OPS, st.booleans()),
    "broadcast": (DTYPES, LENGTHS, RANKS),
    "reduce": (DTYPES, LENGTHS, RANKS, OPS),
    "all_gather": (DTYPES, LENGTHS, st.just(SIZE)),
    "all_gather_into_tensor": (DTYPES, LENGTHS, st.just(SIZE)),
    "reduce_scatter_tensor": (DTYPES, LENGTHS, OPS),
    "all_to_all_single": (DTYPES, LENGTHS),
    "functional": (
        st.sampled_from(
            [
                *(
                    "all_reduce",
                    "all_gather_tensor",
                    "reduce_scatter_tensor",
                    "all_to_all_single",
                    "broadcast",
                ),
                *("all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
            ]
        ),
        DTYPES,
        st.integers(1, 3),
        st.integers(0, 1),
        st.sampled_from(["sum", "min", "max", "product", "SUM"]),
    ),
    "with_options": (
        st.sampled_from(
            ["Allreduce", "Broadcast", "Reduce", "Allgather", "ReduceScatter", "AllToAll", "Barrier"]
        ),
        RANKS,
        OPS,
        st.booleans(),
    ),
    "objects": (RANKS,),
    # None of no elements: Gloo mostly fails with one from any source, and serves nothing after that.
    "messages": (DTYPES, st.integers(1, 5), st.integers(0, 3), st.booleans()),
    "known": (),
    "some_ranks": (st.sampled_from([[0], [1], [0, 1], [1, 0], None]),),
    "told_to_all": (st.integers(0, 3),),
    "works": (),
}


@given(
    program=st.lists(
        st.one_of([st.tuples(st.just(name), st.tuples(*drawn)) for name, drawn in DRAWN.items()]),
        min_size=6,
        max_size=20,
    )
)
@settings(max_examples=10, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
def test_programs(program: list[Call]) -> None:
    compare(program)


WRONG: list[Call] = [
    *[("wrong", ("all_reduce", (value,))) for value in (None, 3, "a", [torch.ones(1)])],
    *[("wrong", ("broadcast", (torch.ones(1), value))) for value in ("0", 2.5)],
    ("wrong", ("all_gather", (torch.ones(2), torch.ones(1)))),
    ("wrong", ("all_gather", ([torch.ones(1), torch.ones(1)], [torch.ones(1)]))),
    ("wrong", ("all_gather_into_tensor", (torch.ones(3), torch.ones(1)))),
    ("wrong", ("reduce_scatter", (torch.ones(1), torch.ones(2)))),
    ("wrong", ("all_to_all_single", ([torch.ones(2)], torch.ones(2)))),
    ("wrong", ("get_group_rank", (None, 0))),
    ("wrong", ("get_global_rank", (3, 0))),
    ("wrong", ("new_group", ([0, 5],))),
    ("wrong", ("new_group", ([0, 1, 0],))),
    ("wrong", ("new_group", (None, "soon"))),
    ("wrong", ("init_process_group", ("gloo",))),
    ("wrong", ("batch_isend_irecv", ([3],))),
    ("wrong", ("P2POp", (3, torch.ones(1), 0))),
    ("wrong", ("broadcast_object_list", ([1], 7))),
    ("wrong", ("no_such_function", ())),
    ("known", ()),
]


def test_wrong_calls() -> None:
    """They raise what torch raises, on the same ranks, and the group goes on."""
    compare(WRONG)


@pytest.mark.parametrize(
    "name", ["get_rank", "get_world_size", "get_backend", "barrier", "destroy_process_group"]
)
def test_without_a_group(name: str) -> None:
    theirs, ours = (outcome(getattr(side, name)) for side in SIDES)
    assert not differs(theirs, ours), (theirs, ours)
