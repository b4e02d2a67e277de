"""Test what can be sent, and how tensors are."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rpc_workers
import torchestra as dist
import worlds
from torchestra import rpc
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.p2p.endpoint import Endpoint
from torchestra.errors import RpcTimeoutError
from torchestra.rpc import plain
from torchestra.rpc.current import current_agent
from torchestra.rpc.messages import ANSWER, CALL, TENSOR_ANSWER, address_of, decode, encode, to_self

LONGEST = 30.0


def through(value):
    return decode(to_self(0, CALL, 1, encode(value)))


def through_plain(tensor):
    """As :func:`through`, of an ordinary tensor as the only content; None for others."""
    encoded = plain.encode_tensor(tensor, None, {})
    if encoded is None:
        return None
    return plain.decode_tensor(to_self(0, TENSOR_ANSWER, 1, encoded), None, 0, {})


def echo(value):
    return value


def plus(value, number):
    return value + number


def change_first(values):
    values[0].add_(1)
    return values


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    step=st.integers(1, 3),
    offset=st.integers(0, 9),
    grad=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_tensor_arrives_as_it_is(dtype, shape, step, offset, grad) -> None:
    base = torch.randint(0, 2, (2 + offset + step * 1000,)).to(dtype)
    count = int(torch.tensor(shape).prod()) if shape else 1
    tensor = (
        base[offset : offset + step * count : step].reshape(shape).permute(tuple(range(len(shape)))[::-1])
    )
    tensor.requires_grad_(grad and dtype.is_floating_point)
    alone = through_plain(tensor)
    assert (alone is not None) == (tensor.is_contiguous() and tensor.numel() > 0)
    for found in filter(lambda found: found is not None, (through({"here": [tensor]})["here"][0], alone)):
        assert (found.dtype, found.shape, found.requires_grad) == (
            tensor.dtype,
            tensor.shape,
            tensor.requires_grad,
        )
        assert torch.equal(found, tensor)
        assert found.is_leaf


def test_views_share_their_storage_and_only_what_they_reach_is_sent() -> None:
    base = torch.arange(100_000.0)
    first, second = base[10_000:20_000], base[15_000:25_000]
    message = encode([first, second])
    assert [length for _, length in message.parts[1:]] == [60_000]
    found = decode(to_self(0, CALL, 1, message))
    found[0][5_000] = -1
    assert found[1][0] == -1
    assert base[15_000] == 15_000


def test_a_sparse_view_of_a_large_tensor_is_sent_alone() -> None:
    base = torch.arange(5_000_000.0)
    message = encode(base[::1000])
    assert [length for _, length in message.parts[1:]] == [20_000]
    assert torch.equal(decode(to_self(0, CALL, 1, message)), base[::1000])


def test_the_address_of_bytes_is_where_they_are() -> None:
    for text in (b"x", b"torchestra" * 1000):
        assert ctypes.string_at(address_of(text), len(text)) == text


def test_memory_is_not_copied_into_the_pickle() -> None:
    assert len(encode(torch.zeros(1 << 20)).text) < 500


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
        torch.empty(3, device="meta"),
    ],
    ids=["coo", "conj", "parameter", "meta"],
)
def test_tensors_of_other_kinds(value: torch.Tensor) -> None:
    found = through(value)
    assert type(found) is type(value)
    assert found.layout == value.layout
    assert found.requires_grad == value.requires_grad
    if value.device.type == "meta":
        assert found.shape == value.shape
    else:
        assert torch.equal(found.to_dense(), value.to_dense())


def test_a_storage_and_a_module() -> None:
    storage = torch.arange(4.0).untyped_storage()
    assert bytes(through(storage)) == bytes(storage)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found = through(module).state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value), name


def large_messages() -> None:
    large = torch.arange(1 << 22, dtype=torch.int32)
    assert torch.equal(rpc.rpc_sync("worker1", echo, (large,)), large)
    text = "x" * 3_000_000
    assert rpc.rpc_sync("worker1", echo, (text,)) == text
    futures = [rpc.rpc_async("worker1", echo, ((large[: 1 << 18] + number, number),)) for number in range(8)]
    for number, future in enumerate(futures):
        tensor, found = future.wait()
        assert found == number
        assert torch.equal(tensor, large[: 1 << 18] + number)
    x = torch.zeros(3)
    assert rpc.rpc_sync("worker1", change_first, ([x, x],))[1].tolist() == [1, 1, 1]
    assert x.tolist() == [0, 0, 0]


def test_large_messages_and_shared_tensors(kind: str) -> None:
    rpc_workers.first(kind, 2, large_messages)


def exchange(rank: int) -> None:
    others = [peer for peer in range(3) if peer != rank]
    mine = torch.full((1 << 17,), rank)
    futures = [rpc.rpc_async(peer, echo, (mine,)) for _ in range(10) for peer in others]
    for future in futures:
        assert torch.equal(future.wait(), mine)


def test_everybody_sends_to_everybody_more_than_the_channels_hold(kind: str) -> None:
    rpc_workers.run(kind, 3, exchange)


def shared() -> int:
    gc.collect()
    return current_agent().router.shared_buffers.in_use


def await_none_shared() -> None:
    """Wait until no buffer is in use; a thread that has received a tensor may have it for a moment longer."""
    deadline = time.monotonic() + LONGEST
    while shared() or rpc.rpc_sync("worker1", shared):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def share_and_release() -> None:
    large = torch.arange(1 << 18)
    kept = [rpc.rpc_sync("worker1", torch.add, (large, number)) for number in range(2)]
    kept += [rpc.rpc_sync("worker1", plus, (large, number)) for number in range(2, 4)]
    assert rpc.rpc_sync("worker1", shared) == 4
    kept[0].add_(1)  # shared memory is the borrower's own
    assert torch.equal(kept[1], large + 1)
    kept.clear()
    await_none_shared()


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_shared_buffers_come_back_when_the_tensors_that_lie_in_it_die(kind: str) -> None:
    rpc_workers.first(kind, 2, share_and_release)


_kept: list[torch.Tensor] = []


def keep(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    _kept[:] = [value]
    return value.requires_grad_(requires_grad)


def change_kept() -> None:
    _kept.pop().detach().fill_(-1)


def to_sparse(value: torch.Tensor) -> torch.Tensor:
    return value.to_sparse()


def double_half(value: torch.Tensor) -> torch.Tensor:
    value.mul_(2)
    return value[: value.numel() // 2]


def half_and_whole(value: torch.Tensor) -> list[torch.Tensor]:
    return [value[: value.numel() // 2], value]


def give_back() -> None:
    large = torch.arange(1 << 18)
    found = rpc.rpc_sync("worker1", echo, (large,))
    assert (shared(), rpc.rpc_sync("worker1", shared)) == (1, 0)
    found.add_(1)
    assert torch.equal(rpc.rpc_sync("worker1", double_half, (large,)), 2 * large[: 1 << 17])
    assert torch.equal(large, torch.arange(1 << 18))
    for requires_grad in (False, True):
        kept = rpc.rpc_sync("worker1", keep, (large.float(), requires_grad))
        rpc.rpc_sync("worker1", change_kept)
        assert torch.equal(kept, large.float())
        assert kept.requires_grad == requires_grad
    assert torch.equal(rpc.rpc_sync("worker1", to_sparse, (large[:5],)).to_dense(), large[:5])
    half, whole = rpc.rpc_sync("worker1", half_and_whole, (large,))
    assert half.data_ptr() == whole.data_ptr()
    del found, kept, half, whole
    await_none_shared()


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_a_buffer_goes_back_without_a_copy_if_nobody_else_has_the_tensor_in_it(kind: str) -> None:
    rpc_workers.first(kind, 2, give_back)


_has_looked = threading.Event()


def look_while_it_is_being_answered() -> None:
    large = torch.arange(1 << 18)
    for function in (half_and_whole, to_sparse, torch.neg):
        _has_looked.clear()
        rpc.rpc_sync("worker1", function, (large,))
        assert shared() == 0, function
        _has_looked.set()


def test_a_buffer_is_free_as_soon_as_the_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the thread that has sent the answer goes on."""
    send = Endpoint.send

    def return_late(self: Endpoint, peer: int, kind: int, *args: Any) -> None:
        send(self, peer, kind, *args)
        if kind in (ANSWER, TENSOR_ANSWER):
            assert _has_looked.wait(LONGEST)

    monkeypatch.setattr(Endpoint, "send", return_late)
    rpc_workers.first("threads", 2, look_while_it_is_being_answered)


_may_answer = threading.Event()


def answer_late(value: Any) -> Any:
    assert _may_answer.wait(LONGEST)
    return value


def drop_late_answers() -> None:
    large = torch.arange(1 << 18)
    _may_answer.clear()
    for value in (large, [large, large + 1], large.float().requires_grad_()):
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", answer_late, (value,), timeout=0.01)
    _may_answer.set()
    await_none_shared()


def test_shared_buffers_of_answers_that_come_too_late_come_back() -> None:
    rpc_workers.first("threads", 2, drop_late_answers)


def keep_what_was_shared(rank: int) -> torch.Tensor | None:
    """Two tensors that lie in shared buffers, of which it drops one."""
    if rank != 0:
        return None
    large = torch.arange(1 << 18)
    kept, _ = (rpc.rpc_sync("worker1", echo, (large + number,)) for number in range(2))
    return kept


def outlive_the_owner() -> bool:
    rank = rpc_workers.begin()
    kept = keep_what_was_shared(rank)
    rpc.shutdown()
    gc.collect()
    dist.barrier()  # all owners are gone
    return kept is None or torch.equal(kept, torch.arange(1 << 18))


@pytest.mark.parametrize("kind", worlds.KINDS)
def test_shared_buffers_last_as_long_as_the_tensors_that_lie_in_it(kind: str) -> None:
    assert worlds.run(kind, 2, outlive_the_owner) == [True, True]


def test_a_message_whose_sender_died_halfway_never_comes_and_others_do() -> None:
    arena, descriptor = Arena.create(layout_for(2), "pair")
    os.close(descriptor)
    contexts = [RankContext(arena, rank, "pair", SpinPolicy(0, 0)) for rank in range(2)]
    endpoints = []
    for context in contexts:
        context.sleep_times.set(0.001)
        channels = arena.address + arena.layout.channels
        endpoints.append(Endpoint(context.address, channels, context.rank, 2, lambda rank: rank == 0))
    dead, alive = endpoints
    large = torch.ones(64 << 20, dtype=torch.uint8)  # more than the channel holds
    dead._lost = lambda rank: True  # it ends in the middle
    dead.send(1, 3, 5, [(large.data_ptr(), large.numel())])
    assert alive.receive(eager=False) is None
    alive.send(1, 3, 6, [(large.data_ptr(), 10)])
    message = alive.receive(eager=False)
    assert message is not None
    assert (message.source, message.tag, len(message.text)) == (1, 6, 10)
