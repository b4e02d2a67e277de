"""A process forked from a rank is no rank: it is refused, disturbs nobody, may have a world of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchestra as dist
from worlds import KINDS, run

LIMIT_S = 30.0


def in_child(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a child that is forked here; what it raises is raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                told = (function(), None)
            except BaseException as error:
                told = (None, error)
            os.write(writer, pickle.dumps(told))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        value, error = pickle.loads(file.read())
    os.waitpid(pid, 0)
    if error is not None:
        raise error
    return value


def begin_message(tensor: torch.Tensor, rank: int) -> dist.Work:
    return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)


def operations(shared: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls of a rank; all but the last two are made before the fork, and so have fast paths."""
    one, two, rank = torch.ones(1), torch.ones(2), dist.get_rank()
    return {
        "all_reduce": lambda: dist.all_reduce(torch.full((1,), 1000.0)),
        "all_reduce in shared memory": lambda: dist.all_reduce(shared),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([one.clone(), two.clone()]),
        "async all_reduce": lambda: dist.all_reduce(one.clone(), async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(one.clone(), 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(2), one),
        "all_gather": lambda: dist.all_gather([torch.zeros(1) for _ in range(2)], one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(1), two),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2), two),
        "barrier": dist.barrier,
        "send or recv": lambda: dist.send(one, 1) if rank == 0 else dist.recv(torch.zeros(1), 0),
        "isend or irecv": lambda: begin_message(one.clone(), rank).wait(),
        "all_gather_object": lambda: dist.all_gather_object([None, None], "x"),
        "new_group": dist.new_group,
        "empty": lambda: dist.empty(5),
        "monitored_barrier": dist.monitored_barrier,
        "shrink": lambda: dist.group.WORLD.shrink([1 - rank]),
        "abort": dist.group.WORLD.abort,
    }


def try_all(shared: torch.Tensor, pending: dist.Work) -> dict[str, str]:
    calls = operations(shared)
    calls["wait for what the rank began"] = pending.wait
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "was not refused"
        except BaseException as error:
            found[name] = repr(error)
    refused = f"process {os.getpid()}, which was forked"
    return {
        name: outcome
        for name, outcome in found.items()
        if not (outcome.startswith("ForkedProcessError") and refused in outcome)
    }


def fork_and_go_on() -> None:
    rank = dist.get_rank()
    shared = dist.zeros(1 << 18)
    for call in list(operations(shared).values())[:-2] * 2:
        call()
    shared.fill_(7.0)

    def child() -> tuple[bool, int, dict[str, str]]:
        facts = dist.is_initialized(), dist.get_rank()
        found = try_all(shared, pending)
        return (*facts, found)

    def leave() -> None:
        nonlocal shared
        gc.collect()
        del shared
        gc.collect()
        dist.destroy_process_group()
        assert not dist.is_initialized()

    # While the child is made a lock of the group is held, and an operation waits for it.
    with dist.group.WORLD.communicator.lock if rank == 0 else contextlib.nullcontext():
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        if rank == 0:
            assert in_child(child) == (True, 0, {})
            in_child(leave)
    pending.wait()
    assert torch.equal(shared, torch.full((1 << 18,), 7.0)), "the child has given the rank's memory back"
    for value in (1.0, 2.0):
        tensor = torch.full((1,), value + rank)
        dist.all_reduce(tensor)
        assert tensor.item() == 2 * value + 1
        dist.all_reduce(shared)
    assert shared[0].item() == 28.0
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_is_refused_everywhere_and_the_ranks_go_on(kind: str) -> None:
    run(kind, 2, fork_and_go_on)


def meet_in_children(directory: str) -> None:
    rank = dist.get_rank()

    def child() -> tuple[int, float]:
        store = dist.FileStore(f"{directory}/store", 2)
        dist.init_process_group("native", store=store, rank=1 - rank, world_size=2, timeout=LIMIT_S)
        tensor = torch.full((1,), 10.0 + rank)
        dist.all_reduce(tensor)
        dist.barrier(dist.new_group())
        found = dist.get_rank(), tensor.item()
        dist.destroy_process_group()
        return found

    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    assert in_child(child) == (1 - rank, 21.0)
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0


def test_children_may_have_a_world_of_their_own() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run("processes", 2, meet_in_children, directory)


class Careless(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            dist.all_reduce(torch.ones(1))
        return index + 10 * dist.get_rank()


def load() -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    loader = iter(DataLoader(Careless(), batch_size=1, num_workers=1, multiprocessing_context="fork"))
    assert [int(next(loader)) - 10 * rank for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="forked from this rank"):
        next(loader)
    loader._shutdown_workers()  # its end would be that of the worker, which looks every five seconds
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0


def test_the_workers_of_a_data_loader_know_the_rank_and_are_refused() -> None:
    run("processes", 2, load)
