"""Hooks around operations, as torch has them since 2.14. What they are told is what Gloo's are told there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch_worlds
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ["torchestra", "gloo"] if hasattr(dist.ProcessGroup, "register_pre_hook") else ["torchestra"]
Told = tuple[str, bool, list[int], list[int], int]
"""An operation, whether it is asynchronous, the sizes of its inputs and outputs, and its root."""


def everything(rank: int) -> None:
    first = rank == 0
    tensor, pair = torch.ones(3), torch.ones(6)
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    dist.broadcast(tensor, 1)
    dist.all_gather([torch.zeros(3), torch.zeros(3)], tensor)
    dist.all_gather_into_tensor(pair, tensor)
    dist.reduce_scatter_tensor(tensor, pair)
    dist.all_to_all_single(torch.zeros(6), pair)
    dist.gather(tensor, [torch.zeros(3), torch.zeros(3)] if first else None)
    dist.scatter(tensor, [torch.zeros(3), torch.zeros(3)] if first else None)
    dist.reduce(tensor, 1)
    if first:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def form(operation: str, kind: str) -> str:
    """Return torch's name of a form of an operation; 2.14 has one for all forms."""
    names = getattr(c10d, "HookOpName", None)
    return f"{operation}_{kind}" if names is None or hasattr(names, f"{operation}_{kind}") else operation


def expected(rank: int) -> list[Told]:
    first = rank == 0
    message: Told = ("SEND", True, [3], [], 1) if first else ("RECV", True, [], [3], 0)
    return [
        ("ALLREDUCE", False, [3], [], -1),
        ("ALLREDUCE", True, [3], [], -1),
        ("BARRIER", False, [], [], -1),
        ("BROADCAST", False, [3], [], 1),
        ("ALLGATHER", False, [3], [3, 3], -1),
        (form("ALLGATHER", "BASE"), False, [3], [6], -1),
        (form("REDUCE_SCATTER", "BASE"), False, [6], [3], -1),
        (form("ALLTOALL", "BASE"), False, [6], [6], -1),
        ("GATHER", False, [3], [3, 3] if first else [], 0),
        ("SCATTER", False, [3, 3] if first else [], [3], 0),
        ("REDUCE", False, [3], [], 1),
        message,
    ]


def hook_everything() -> None:
    group: Any = dist.group.WORLD
    before: list[Any] = []
    after: list[Any] = []

    def note(told: Any) -> None:
        sizes = [[tensor.numel() for tensor in each] for each in (told.input_tensors, told.output_tensors)]
        name = getattr(told.name, "name", told.name)
        before.append(((name, told.async_op, *sizes, told.root), told.op_id))

    def note_work(told: Any) -> None:
        assert isinstance(told.work, dist.Work)
        after.append((getattr(told.name, "name", told.name), told.op_id))

    rank = dist.get_rank()
    everything(rank)  # and opens the fast path
    group.register_pre_hook(7, note)
    group.register_post_hook(7, note_work)
    everything(rank)
    assert [told for told, _ in before] == expected(rank)
    assert [number for _, number in before] == list(range(before[0][1], before[0][1] + len(before)))
    assert after == [(told[0], number) for told, number in before]
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    del before[:]
    model(torch.ones(2, 3)).sum().backward()  # its C++ reducer begins the operations
    assert "ALLREDUCE" in {told[0] for told, _ in before}
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    del before[:], after[:]
    everything(rank)
    assert not before
    assert not after
    assert getattr(group, "_fast_path", True) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_are_told_of_every_operation(backend: str) -> None:
    torch_worlds.run(2, hook_everything, backend=backend)


def refuse(told: Any) -> None:
    raise LookupError("not now")


def stop_operations() -> None:
    group: Any = dist.group.WORLD
    group.register_pre_hook(0, refuse)
    tensor = torch.ones(2)
    for call in (lambda: dist.all_reduce(tensor), lambda: dist.send(tensor, 1 - dist.get_rank())):
        with pytest.raises(LookupError, match="not now"):
            call()
    group.unregister_pre_hook(0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operation_that_a_hook_refuses_has_not_begun(backend: str) -> None:
    torch_worlds.run(2, stop_operations, backend=backend)


def check_for_nan() -> None:
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    checked = dist.new_group()
    del os.environ["TORCH_DIST_NAN_CHECK"]
    odd = torch.tensor([1.0, float("nan")])
    with pytest.raises(RuntimeError, match="NaN found in input tensor"):
        dist.all_reduce(odd, group=checked)
    dist.all_reduce(odd)
    odd[1] = 0
    dist.all_reduce(odd, group=checked)
    assert odd.tolist() == [4.0, 0.0]
    dist.all_reduce(torch.ones(2, dtype=torch.int64), group=checked)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_checked_for_nan_where_the_environment_asks_for_it(backend: str) -> None:
    torch_worlds.run(2, check_for_nan, backend=backend)


def ask_for_what_is_not_served() -> None:
    group: Any = dist.group.WORLD
    assert not group.supports_abort_hooks
    with pytest.raises(RuntimeError, match="torchestra does not support"):
        group.register_abort_hook(1, print)


def test_abort_hooks_are_refused() -> None:
    torch_worlds.run(1, ask_for_what_is_not_served)


def put_into_the_next(functions: bool) -> None:
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.zeros(size)
    if functions:  # of torch 2.14 and later
        support: Any = dist
        assert support._supports_window()
        window = support._new_window(mine)
        assert isinstance(window, c10d.Window)  # type: ignore[attr-defined]
        assert window.get_attr(0).access_type.name == "UNIFIED"
        with pytest.raises(RuntimeError):
            window.get_attr(size)
    else:
        assert group.supports_window
        window = group.new_window()
        window.tensor_register(mine)
    after, before = (rank + 1) % size, (rank - 1) % size
    work = window.put(torch.tensor([rank + 1.0]), after, rank, True)
    assert work.is_completed()
    assert work.wait()
    window.signal(after, False)
    pending = window.wait_signal(before, True)
    assert pending.wait()
    assert mine[before] == before + 1
    assert window.map_remote_tensor(after)[rank] == rank + 1
    window.tensor_deregister()
    with pytest.raises(RuntimeError, match="no tensor is registered"):
        window.put(torch.ones(1), after, 0, False)


def test_ranks_write_into_windows_of_each_other() -> None:
    torch_worlds.run(2, put_into_the_next, hasattr(dist, "_new_window"))


def windows_over_hosts(functions: bool) -> None:
    """Put and signalled from host to host; memory is mapped only where it is in reach."""
    rank, group, support = dist.get_rank(), dist.group.WORLD, dist
    make: Any = support._new_window if functions else group.new_window  # type: ignore[attr-defined]
    supported = support._supports_window() if functions else group.supports_window  # type: ignore[attr-defined]
    assert supported
    mine = torch.zeros(3)
    window = make(mine)
    if functions:
        assert window.get_attr((rank + 1) % 3).access_type.name == "UNIFIED"
    for peer in range(3):
        work = window.put(torch.tensor([rank + 1.0]), peer, rank, peer != 2)
        window.signal(peer, False)
        assert work.wait()
    for peer in range(3):
        window.wait_signal(peer, False)
    assert mine.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="elements 3 to 4 are not all in the 3"):
        window.put(torch.ones(1), 0 if rank == 2 else 2, 3, False)
    with pytest.raises(ValueError, match="on another host; write with put"):
        window.map_remote_tensor(0 if rank == 2 else 2)
    window.tensor_deregister()


def test_windows_over_several_hosts() -> None:
    torch_worlds.run(3, windows_over_hosts, hasattr(dist, "_new_window"), hosts=2)
