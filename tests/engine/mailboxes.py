"""The mailboxes of several ranks over one mapping, which the tests of messages call with arrays."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.p2p import layout
from torchestra.engine.p2p.mailbox import Mailbox
from torchestra.engine.p2p.transfer import Transfer
from torchestra.engine.recorder import clock
from torchestra.system.deadline import Deadline

RING = layout.ring_bytes(2)
LIMIT = 60.0


class Waiter:
    """Lets a call wait for ``timeout_s``, counts how often it was asked, and remembers aborts."""

    def __init__(self, timeout_s: float = LIMIT) -> None:
        self.timeout_s = timeout_s
        self.checks = 0
        self.aborts: list[str] = []

    def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> None:
        self.checks += 1
        if deadline.elapsed() > self.timeout_s:
            raise TimeoutError(f"{doing}: blocked on {blocked}")

    def abort(self, reason: str) -> None:
        self.aborts.append(reason)


class Ranks:
    """The mailboxes of ``size`` ranks over one mapping; a forked rank uses its own of them."""

    def __init__(self, size: int, mailbox: Any = Mailbox, spins: int = 100, yields: int = 20) -> None:
        self.size = size
        self.waiter = Waiter()
        self._memory = np.frombuffer(
            mmap.mmap(-1, layout.PAGE + layout.channel_area_bytes(size)), dtype=np.uint8
        )
        address = self._memory.ctypes.data
        self.poll_interval = np.array([0, 50_000_000], dtype=np.int64)
        self.control = np.zeros((size, at.CONTROL_BYTES // 8), dtype=np.int64)
        self.masks = np.zeros((size, 2 * at.MASK_BYTES // 8), dtype=np.int64)
        self.contexts = np.zeros((size, at.CONTEXT_BYTES // 8), dtype=np.int64)
        record_bytes = at.Layout(size, 0, 0, 0, 0).record_bytes
        self.records = np.zeros((size, record_bytes // 8), dtype=np.int64)
        self.mailboxes: list[Mailbox] = []
        for rank, context in enumerate(self.contexts):
            for offset, value in (
                (at.RANK, rank),
                (at.SIZE, size),
                (at.ABORT, address),
                (at.SPINS, spins),
                (at.YIELDS, yields),
                (at.POLL_INTERVAL, self.poll_interval.ctypes.data),
                (at.STREAM_ABOVE, 1 << 19),
                (at.RECORD, self.records[rank].ctypes.data),
                (at.CLOCK, clock.NANOSECONDS),
                (at.CONTROL, self.control.ctypes.data),
                (at.CORES, size),
                (at.MASKS, self.masks[rank].ctypes.data),
            ):
                context[offset // 8] = value
            self.mailboxes.append(mailbox(context.ctypes.data, address + layout.PAGE, rank, size, "test"))

    def __getitem__(self, rank: int) -> Port:
        return Port(self.mailboxes[rank], self.waiter)

    def close(self) -> None:
        for mailbox in self.mailboxes:
            mailbox.close()

    def as_threads(self, work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)
                self.waiter.timeout_s = 0  # the others need not wait for this one

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]

    def as_processes(self, work: Callable[[int], None]) -> None:
        children = []
        for rank in range(self.size):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    work(rank)
                    status = 0
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                finally:
                    os._exit(status)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * self.size


class Port:
    """A mailbox that is called with arrays."""

    def __init__(self, mailbox: Mailbox, waiter: Waiter) -> None:
        self.mailbox = mailbox
        self.waiter = waiter

    def send(self, data: Any, to: int, tag: int = 0, kind: int = 0) -> None:
        self.mailbox.send(data.ctypes.data, data.nbytes, kind, to, tag, self.waiter)

    def recv(self, data: Any, source: int | None, tag: int = 0, kind: int = 0) -> int:
        return self.mailbox.recv(data.ctypes.data, data.nbytes, kind, source, tag, self.waiter)

    def isend(self, data: Any, to: int, tag: int = 0, **more: Any) -> Transfer:
        return self.mailbox.isend(data.ctypes.data, data.nbytes, 0, to, tag, self.waiter, **more)

    def irecv(self, data: Any, source: int | None, tag: int = 0, **more: Any) -> Transfer:
        return self.mailbox.irecv(data.ctypes.data, data.nbytes, 0, source, tag, self.waiter, **more)


def numbers(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.uint8 if count <= 256 else np.int32)


def like(data: Any) -> Any:
    return np.full_like(data, 0xEE)


def await_all(transfers: list[Transfer]) -> None:
    deadline = time.monotonic() + LIMIT
    while not all(transfer.finished for transfer in transfers):
        assert time.monotonic() < deadline, "transfers do not finish"
        time.sleep(0.001)
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error


def waited_for(asynchronous: bool, port: Port, operation: str, *arguments: Any) -> None:
    """A blocking call, or the same begun and waited for."""
    if asynchronous:
        await_all([getattr(port, f"i{operation}")(*arguments)])
    else:
        getattr(port, operation)(*arguments)


def equal(received: Any, sent: Any, what: str) -> None:
    if not np.array_equal(received, sent):
        wrong = np.flatnonzero(received != sent)
        raise AssertionError(f"{what}: {len(wrong)} of {len(sent)} bytes differ, the first at {wrong[0]}")
