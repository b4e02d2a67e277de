"""Tensors that ranks read where they lie: the same results on both kinds of ranks, or an error."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import random
import signal
import struct
from typing import Any

import pytest
import torch

import torchestra as dist
from torchestra.engine import layout as at
from torchestra.engine.kernels.single_copy import _read as read
from torchestra.engine.kernels.single_copy import is_readable
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.operations import ALL_TO_ALL
from torchestra.errors import DistBackendError, GroupAbortedError, RankFailedError
from worlds import KINDS, await_note, processes, run

NEVER = 1 << 62
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_CALL = {"x86_64": 310, "aarch64": 270}.get(os.uname().machine)


def engine_here() -> LocalEngine:
    found = dist.group.WORLD.communicator.engine
    assert isinstance(found, LocalEngine)
    return found


def lend_above(nbytes: int) -> LocalEngine:
    """Have tensors read where they lie, however fast that is here."""
    engine = engine_here()
    engine.choices = dataclasses.replace(engine.choices, single_copy=nbytes, chunk=4096, share=4096)
    if engine.context.load_word(at.READER) == at.UNPROBED:
        engine.context.store_word(at.READER, at.BY_SYSTEM_CALL)
    return engine


def lent(engine: LocalEngine) -> bool:
    """Whether this rank has lent its tensor in the last operation, and all went well."""
    words = engine.context.load_word
    return words(at.LENT) == words(at.SEQUENCE) and words(at.EXTRA_STEP) == 0


def results(seed: int, lengths: list[int], dtype: torch.dtype, offset: int) -> list[torch.Tensor]:
    """What each operation gives for the lengths that ranks send each other."""
    size, rank = dist.get_world_size(), dist.get_rank()
    made = torch.Generator().manual_seed(seed + rank)
    total = sum(lengths) + offset
    source = torch.randint(0, 100, (total,), generator=made).to(dtype)[offset:]
    splits = [lengths[(rank + peer) % size] for peer in range(size)]
    uneven = torch.zeros(sum(splits) + offset, dtype=dtype)[offset:]
    dist.all_to_all_single(uneven, source, splits, splits)
    even = source[: lengths[0] // size * size]
    exchanged = torch.zeros_like(even)
    dist.all_to_all_single(exchanged, even)
    gathered = torch.zeros(size * lengths[0], dtype=dtype)
    dist.all_gather_into_tensor(gathered, source[: lengths[0]])
    outputs = [torch.zeros(lengths[0], dtype=dtype) for _ in range(size)]
    dist.gather(source[: lengths[0]], outputs if rank == 0 else None, 0)
    piece = torch.zeros(lengths[0], dtype=dtype)
    dist.scatter(piece, [source[: lengths[0]]] * size if rank == size - 1 else None, size - 1)
    dist.broadcast(source, 0)
    return [uneven, exchanged, gathered, *outputs, piece, source]


def compare() -> None:
    draw = random.Random(16)
    for seed in range(25):
        lengths = [draw.choice((0, draw.randrange(3000))) for _ in range(dist.get_world_size())]
        dtype, offset = draw.choice((torch.uint8, torch.float32, torch.int64)), draw.randrange(6)
        lend_above(NEVER)
        expected = results(seed, lengths, dtype, offset)
        lend_above(draw.choice((64, 1000, 4096, 9000)))
        assert all(map(torch.equal, results(seed, lengths, dtype, offset), expected))
    lend_above(64)
    exchange_here()
    assert lent(engine_here())


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_way_through_buffers(kind: str) -> None:
    run(kind, 3 if kind == "threads" else 2, compare)


def exchange_here(length: int = 40_000) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.zeros(size * length)
    dist.all_to_all_single(output, torch.full((size * length,), float(rank)))
    assert torch.equal(output, torch.arange(float(size)).repeat_interleave(length))
    return output


def refuse_the_call() -> None:
    """Have the system refuse process_vm_readv in this thread, as a container's filter does."""
    assert _CALL is not None
    load, equal, answer = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 1, _CALL), (answer, 0, 0, 0x00050001), (answer, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert libc.prctl(_SECCOMP, _FILTER, header, 0, 0) == 0


def exchange_where_one_may_not() -> list[int]:
    engine = lend_above(4096)
    engine.context.store_word(at.READER, at.UNPROBED)
    if dist.get_rank() == 1:
        refuse_the_call()
    exchange_here()
    exchange_here()
    return [engine.context.load_word(word) for word in (at.READER, at.EXTRA_STEP)]


@pytest.mark.skipif(_CALL is None, reason="the number of the system call is not known here")
def test_where_the_system_refuses_one_rank_all_go_through_buffers() -> None:
    assert run("processes", 2, exchange_where_one_may_not, fresh=True) == [[at.REFUSED, 0]] * 2


def read_what_cannot_be_read() -> list[bool]:
    """Of a page that cannot be read, and of tensors whose ends can."""
    context = lend_above(4096).context
    size = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), size, 0)
    readable = entry_point(is_readable)
    lengths = (0, 1, size, size + 1, 2 * size)
    found = [bool(readable(context.address, start, length)) for length in lengths]
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), size, mmap.PROT_READ | mmap.PROT_WRITE)
    dist.barrier()
    return found


def test_a_rank_does_not_lend_what_its_peers_could_not_read() -> None:
    assert run("processes", 2, read_what_cannot_be_read) == [[True, True, True, False, False]] * 2


def read_under_a_wrong_token() -> list[bool]:
    """A process that took the number of one that died has another token in its place, or nothing."""
    context: RankContext = lend_above(4096).context
    peer = 1 - context.rank
    values = torch.arange(10_000) * (1 + context.rank)
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, values.data_ptr())
    found = torch.zeros_like(values)
    reads = entry_point(read)
    arguments = (context.address, peer, found.data_ptr(), addresses[peer], found.nbytes)
    told = [bool(reads(*arguments)) and torch.equal(found, torch.arange(10_000) * (1 + peer))]
    dist.barrier()
    context.store_word(at.OWN_TOKEN, 1234)
    dist.barrier()
    told.append(bool(reads(*arguments)))
    dist.barrier()
    return told


def test_memory_is_only_read_of_the_process_that_has_the_rank_s_token() -> None:
    assert run("processes", 2, read_under_a_wrong_token) == [[True, False]] * 2


def lend_what_cannot_be_read() -> str:
    """Rank 1's tensor can be read no more, though both of its ends can: its peer says so, and both fail."""
    lend_above(4096)
    size = mmap.PAGESIZE
    pages = mmap.mmap(-1, 64 * size)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if dist.get_rank() == 1:
        protect = ctypes.CDLL(None).mprotect
        protect(ctypes.c_void_p(tensor.data_ptr() + 8 * size), size, 0)
    try:
        dist.all_to_all_single(torch.zeros(64 * size, dtype=torch.uint8), tensor)
    except (DistBackendError, GroupAbortedError) as error:
        return str(error)
    return "nothing"


def test_a_tensor_that_cannot_be_read_is_an_error_on_both_ranks() -> None:
    told = run("processes", 2, lend_what_cannot_be_read)
    assert "does not let it read the tensor of rank 1, whose process lives" in told[0]
    assert "rank 0 left" in told[1]


def read_of_one_that_died() -> str:
    """Rank 1 ends when it has lent its tensor; all that rank 0 waits for before it reads is there."""
    engine = lend_above(4096)
    length = 40_000
    tensor, output = torch.zeros(2 * length), torch.zeros(2 * length)
    if dist.get_rank() == 1:
        plan = engine.plan(ALL_TO_ALL, torch.float32)
        arguments = (plan.address, 4 * length, tensor.data_ptr(), output.data_ptr())
        assert engine.kernels.all_to_all_even(*arguments) == at.PENDING
        assert lent(engine)
        os.kill(os.getpid(), signal.SIGKILL)
    await_note("dead")
    try:
        dist.all_to_all_single(output, tensor)
    except RankFailedError as error:
        return str(error.ranks)
    return "nothing"


def test_a_rank_that_is_killed_when_it_has_lent_is_named() -> None:
    with processes(2, read_of_one_that_died) as world:
        world.wait(1)
        with open(world.path("dead"), "w"):
            pass
        assert world.wait(0).result() == "(1,)"
