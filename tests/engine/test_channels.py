"""Point-to-point messages: bytes, order, waiting, errors; ranks as threads and as processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from torchestra.engine import layout as at
from torchestra.engine import p2p
from torchestra.engine.p2p import layout
from torchestra.engine.recorder import clock
from torchestra.errors import DistBackendError, GroupAbortedError, GroupDestroyedError
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

    def __init__(self, size: int, package: Any = p2p, spins: int = 100, yields: int = 20) -> None:
        self.size = size
        self.waiter = Waiter()
        self._memory = np.frombuffer(
            mmap.mmap(-1, layout.PAGE + p2p.channel_area_bytes(size)), dtype=np.uint8
        )
        address = self._memory.ctypes.data
        self.poll_interval = np.array([0, 50_000_000], dtype=np.int64)
        self.control = np.zeros((size, at.CONTROL_BYTES // 8), dtype=np.int64)
        self.masks = np.zeros((size, 2 * at.MASK_BYTES // 8), dtype=np.int64)
        self.contexts = np.zeros((size, at.CONTEXT_BYTES // 8), dtype=np.int64)
        record_bytes = at.Layout(size, 0, 0, 0, 0).record_bytes
        self.records = np.zeros((size, record_bytes // 8), dtype=np.int64)
        self.mailboxes: list[p2p.Mailbox] = []
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
            self.mailboxes.append(
                package.Mailbox(context.ctypes.data, address + layout.PAGE, rank, size, "test")
            )

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

    def __init__(self, mailbox: p2p.Mailbox, waiter: Waiter) -> None:
        self.mailbox = mailbox
        self.waiter = waiter

    def send(self, data: Any, to: int, tag: int = 0, kind: int = 0) -> None:
        self.mailbox.send(data.ctypes.data, data.nbytes, kind, to, tag, self.waiter)

    def recv(self, data: Any, source: int | None, tag: int = 0, kind: int = 0) -> int:
        return self.mailbox.recv(data.ctypes.data, data.nbytes, kind, source, tag, self.waiter)

    def isend(self, data: Any, to: int, tag: int = 0, **more: Any) -> p2p.Transfer:
        return self.mailbox.isend(data.ctypes.data, data.nbytes, 0, to, tag, self.waiter, **more)

    def irecv(self, data: Any, source: int | None, tag: int = 0, **more: Any) -> p2p.Transfer:
        return self.mailbox.irecv(data.ctypes.data, data.nbytes, 0, source, tag, self.waiter, **more)


@pytest.fixture
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def numbers(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.uint8 if count <= 256 else np.int32)


def like(data: Any) -> Any:
    return np.full_like(data, 0xEE)


def await_all(transfers: list[p2p.Transfer]) -> None:
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


# -- the stress: random messages against a reference

LENGTHS = (
    0,
    1,
    7,
    31,
    32,
    33,
    64,
    100,
    1000,
    4096,
    16383,
    16384,
    16385,
    32768,
    70_000,
    RING,
    RING + 1,
    700_000,
)
BYTES = np.random.default_rng(1).integers(0, 256, 1 << 21, dtype=np.uint8)
ANY_TAG = 9


def bursts(seed: int, size: int, number: int) -> list[tuple[int, int, list[tuple[int, int, Any]]]]:
    """(source, destination, [(tag, number, payload)]) as they are sent one after the other."""
    chance = random.Random(seed)
    serial = itertools.count()
    result = []
    for _ in range(number):
        messages = []
        for _ in range(chance.choice((1, 1, 2, 4))):
            length = chance.choice(LENGTHS)
            first = chance.randrange(len(BYTES) - length)
            messages.append((chance.randrange(3), next(serial), BYTES[first : first + length]))
        result.append((chance.randrange(size), chance.randrange(size), messages))
    return result


def in_another_order(messages: list[Any], chance: random.Random) -> list[Any]:
    """Shuffled, but those with one tag in the order in which they were sent."""
    tags = [tag for tag, *_ in messages]
    chance.shuffle(tags)
    by_tag = defaultdict(list)
    for message in messages:
        by_tag[message[0]].append(message)
    return [by_tag[tag].pop(0) for tag in tags]


def equal(received: Any, sent: Any, what: str) -> None:
    if not np.array_equal(received, sent):
        wrong = np.flatnonzero(received != sent)
        raise AssertionError(f"{what}: {len(wrong)} of {len(sent)} bytes differ, the first at {wrong[0]}")


def blocking_stress(port: Port, rank: int, seed: int, size: int, number: int) -> None:
    """All ranks go through the bursts in the same order; receives of a burst in another."""
    chance = random.Random(seed)
    for source, destination, messages in bursts(seed, size, number):
        if rank == source:
            for tag, _, payload in messages:
                port.send(payload, destination, tag)
        if rank == destination:
            for tag, serial, payload in in_another_order(messages, chance):
                received = like(payload)
                assert port.recv(received, source, tag) == source
                equal(received, payload, f"message {serial} from {source} to {destination}")


def asynchronous_stress(port: Port, rank: int, seed: int, size: int, number: int) -> None:
    """Everything in flight at once, with a few blocking calls in between; at last some from any source."""
    chance = random.Random(seed + rank)
    transfers = []
    expected: dict[int, list[Any]] = defaultdict(list)
    for source, destination, messages in bursts(seed, size, number):
        if rank == source:
            transfers += [port.isend(payload, destination, tag) for tag, _, payload in messages]
        if rank == destination:
            expected[source] += messages
    received = []
    for source, messages in expected.items():
        for tag, serial, payload in in_another_order(messages, chance):
            target = like(payload)
            received.append((target, payload, f"message {serial} from {source} to {rank}"))
            if chance.random() < 0.1:
                port.recv(target, source, tag)
            else:
                transfers.append(port.irecv(target, source, tag))
    marks = [np.array([rank, turn], dtype=np.int64) for turn in range(20)]
    transfers += [port.isend(mark, to, ANY_TAG) for mark in marks for to in range(size)]
    seen = [[] for _ in range(size)]
    for _ in range(20 * size):
        mark = np.zeros(2, dtype=np.int64)
        source = port.recv(mark, None, ANY_TAG)
        assert source == mark[0]
        seen[source].append(int(mark[1]))
    assert seen == [list(range(20))] * size
    chance.shuffle(transfers)
    for transfer in transfers[::2]:
        port.mailbox.wait(transfer)
    await_all(transfers)
    for target, payload, what in received:
        equal(target, payload, what)
    assert port.mailbox.stored_bytes == 0


@pytest.mark.parametrize("size", [2, 3, 7])
def test_random_messages_arrive_between_threads(size: int) -> None:
    ranks = Ranks(size)

    def work(rank: int) -> None:
        blocking_stress(ranks[rank], rank, size, size, 300)
        asynchronous_stress(ranks[rank], rank, size, size, 150)

    ranks.as_threads(work)
    ranks.close()


def threads_start_in_children() -> bool:
    """Whether a thread that was made before a fork can be started after it; in Python 3.13.0 none can."""
    thread = threading.Thread(target=int)
    if (child := os.fork()) == 0:
        with contextlib.suppress(RuntimeError):
            thread.start()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_random_messages_arrive_between_processes(size: int) -> None:
    if not threads_start_in_children():
        pytest.skip("this Python starts no threads in a child that were made before the fork")
    ranks = Ranks(size)

    def work(rank: int) -> None:
        blocking_stress(ranks[rank], rank, 10 + size, size, 300)
        asynchronous_stress(ranks[rank], rank, 10 + size, size, 150)

    ranks.as_processes(work)


# -- that the stress finds what it is for: the same code with its invariant broken

BREAK = 176  # an unused word of the private state
NOTHING, EAGER_HEAD, EAGER_STAMP, EAGER_TAIL, NO_BELL, LATE_LOOK, OVERTAKING = (4 * code for code in range(7))
# Added to it: who waits a little at the worst moment, before it copies a piece or while it goes to sleep.
SLOW_SENDER, SLOW_RECEIVER, SLOW_SLEEPER = 1, 2, 3


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A copy of the package in which the state's word BREAK says which part of the protocol is violated.

    One side waits where that is worst, so that the peer acts just then: the unbroken protocol stands that.
    """
    folder = tmp_path_factory.mktemp("mutant")
    shutil.copytree(
        Path(p2p.__file__).parent, folder / "breakable", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in (folder / "breakable").glob("*.py"):
        file.write_text(file.read_text().replace("torchestra.engine.p2p", "breakable"))
    ring = folder / "breakable" / "ring.py"
    text = ring.read_text()
    for old, new in (
        (
            "    memcpy(channel + w.DATA_AT",
            f"    if load(state + {BREAK}) & 28 == {EAGER_HEAD}:\n"
            "        store_ordered(channel + w.HEAD, head + ((length + 63) & ~63))\n"
            f"    if load(state + {BREAK}) & 3 == {SLOW_SENDER}:\n"
            "        usleep(100)\n"
            "    memcpy(channel + w.DATA_AT",
        ),
        (
            "    length = load(record + w.LENGTH)\n    if length <= w.INLINE_BYTES:\n",
            "    length = load(record + w.LENGTH)\n"
            f"    if load(state + {BREAK}) & 28 == {EAGER_STAMP}:\n"
            "        store_ordered(slot + w.STAMP, sent + 1)\n"
            "    if length <= w.INLINE_BYTES:\n",
        ),
        (
            "        destination = load(known + w.DESTINATION)\n",
            "        destination = load(known + w.DESTINATION)\n"
            f"        if load(state + {BREAK}) & 28 == {EAGER_TAIL}:\n"
            "            store_ordered(channel + w.TAIL, tail + ring)\n"
            f"        if load(state + {BREAK}) & 3 == {SLOW_RECEIVER}:\n"
            "            usleep(300)\n",
        ),
        (
            "PIECES_AT_ONCE = 8\n",
            "PIECES_AT_ONCE = 8\nfrom torchestra.engine.native.atomics import External\n"
            'usleep = External("usleep", "i32", "i32")\n',
        ),
        (
            "    doorbell = load(state + w.DOORBELLS) + rank * w.DOORBELL_BYTES\n    if load",
            "    doorbell = load(state + w.DOORBELLS) + rank * w.DOORBELL_BYTES\n"
            f"    if load(state + {BREAK}) & 28 != {NO_BELL} and load",
        ),
        (
            "    rung = load_ordered(doorbell + w.RUNG)\n"
            "    store_ordered(doorbell + w.SLEEPING, 1)\n"
            "    full_fence()\n",
            "    rung = load_ordered(doorbell + w.RUNG)\n"
            f"    slow = load(state + {BREAK}) & 3 == {SLOW_SLEEPER}\n"
            "    if slow:\n"
            "        usleep(50)\n"
            "    store_ordered(doorbell + w.SLEEPING, 1)\n"
            "    if slow:\n"
            "        usleep(50)\n"
            "    full_fence()\n"
            f"    if load(state + {BREAK}) & 28 == {LATE_LOOK}:\n"
            "        rung = load_ordered(doorbell + w.RUNG)\n",
        ),
    ):
        assert text.count(old) == 1, "the source no longer looks as this test expects"
        text = text.replace(old, new)
    ring.write_text(text)
    immediate = folder / "breakable" / "immediate.py"
    text, old = immediate.read_text(), "load(known + w.STORE + w.FIRST) == 0"
    assert text.count(old) == 1, "the source no longer looks as this test expects"
    immediate.write_text(text.replace(old, f"(load(state + {BREAK}) & 28 == {OVERTAKING} or {old})"))
    sys.path.insert(0, str(folder))
    try:
        yield import_module("breakable")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "breakable"]:
            del sys.modules[name]


def broken(package: ModuleType, how: int, size: int = 2, **options: int) -> Ranks:
    ranks = Ranks(size, package, **options)
    for mailbox in ranks.mailboxes:
        mailbox._words[BREAK // 8] = how
    return ranks


def stream(ranks: Ranks, length: int, times: int) -> None:
    """One rank sends one length over and over, other bytes each time."""

    def work(rank: int) -> None:
        for turn in range(times):
            payload = BYTES[turn * 64 : turn * 64 + length]
            if rank == 0:
                ranks[0].send(payload, 1)
            else:
                received = like(payload)
                ranks[1].recv(received, 0)
                equal(received, payload, f"message {turn}")

    ranks.as_threads(work)
    ranks.close()


def streams(package: ModuleType, how: int, length: int) -> None:
    """Several in a row: while both ranks are on one core they take turns, and one may see nothing."""
    for _ in range(20):
        stream(broken(package, how, spins=1_000_000), length, 300)


@pytest.mark.parametrize(
    ("how", "slow", "length"),
    [
        (EAGER_HEAD, SLOW_SENDER, 700_000),
        (EAGER_STAMP, SLOW_SENDER, 10_000),
        (EAGER_TAIL, SLOW_RECEIVER, 700_000),
    ],
)
def test_the_stress_sees_a_broken_protocol(breakable: ModuleType, how: int, slow: int, length: int) -> None:
    """Published before it is written, or given back before it is read: wrong bytes, and they are seen."""
    stream(broken(breakable, NOTHING + slow, spins=1_000_000), length, 10)
    with pytest.raises((AssertionError, TimeoutError, DistBackendError)):
        streams(breakable, how + slow, length)


def ping_pong(ranks: Ranks, turns: int, done: list[int]) -> None:
    """Rank 0 with all others. Every wait sleeps at once, and for very long if it is not woken."""
    ranks.poll_interval[0] = 1000

    def work(rank: int) -> None:
        data = numbers(4)
        for turn in range(turns):
            for peer in range(1, ranks.size) if rank == 0 else (0,):
                if rank == 0:
                    ranks[rank].send(data, peer)
                else:
                    ranks[rank].recv(data, peer)
            for peer in range(1, ranks.size) if rank == 0 else (0,):
                if rank == 0:
                    ranks[rank].recv(data, peer)
                else:
                    ranks[rank].send(data, peer)
            done[rank] = turn

    ranks.as_threads(work)
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
def test_no_wake_up_is_lost(breakable: ModuleType, size: int) -> None:
    """With more than two ranks, they are also woken by others than the one they wait for."""
    ping_pong(Ranks(size, spins=0, yields=0), 2000, [0] * size)
    ping_pong(broken(breakable, NOTHING + SLOW_SLEEPER, size, spins=0, yields=0), 200, [0] * size)


@pytest.mark.parametrize(("how", "size"), [(NO_BELL, 2), (LATE_LOOK + SLOW_SLEEPER, 4)])
def test_a_lost_wake_up_is_seen(breakable: ModuleType, how: int, size: int) -> None:
    """Where nobody rings, or a ring can be overlooked, the same ping-pong hangs."""
    ranks = broken(breakable, how, size, spins=0, yields=0)
    done = [0] * size
    failures: list[BaseException] = []

    def play() -> None:
        try:
            ping_pong(ranks, 1_000_000, done)
        except GroupDestroyedError as error:
            failures.append(error)

    player = threading.Thread(target=play)
    player.start()
    before = None
    while before != done:
        before = list(done)
        player.join(1.0)
    for rank, mailbox in enumerate(ranks.mailboxes):
        mailbox._words[BREAK // 8] = NOTHING
        # Whose doorbell was rung too early looks awake; without this, closing would not wake it either.
        ranks._memory[layout.PAGE + rank * layout.DOORBELL_BYTES + layout.SLEEPING] = 1
    ranks.close()
    player.join(LIMIT)
    assert failures
    assert max(done) < 999_999


# -- matching


def test_messages_are_taken_by_tag(pair: Ranks) -> None:
    one, two = numbers(100), numbers(RING + 5)
    pair[0].send(one, 1, tag=1)
    sent = pair[0].isend(two, 1, tag=2)
    second, first = like(two), like(one)
    pair[1].recv(second, 0, tag=2)
    assert pair.mailboxes[1].stored_bytes == one.nbytes
    pair[1].recv(first, 0, tag=1)
    assert pair.mailboxes[1].stored_bytes == 0
    await_all([sent])
    equal(first, one, "the first")
    equal(second, two, "the second")


def receive_after_an_unexpected_message(ranks: Ranks) -> None:
    sent = [(1, numbers(8)), (2, numbers(8, 20)), (1, numbers(8, 40))]
    try:
        for tag, data in sent:
            ranks[0].send(data, 1, tag)
        for tag, data in (sent[1], sent[0], sent[2]):
            received = like(data)
            ranks[1].recv(received, 0, tag)
            equal(received, data, f"tag {tag}")
    finally:
        ranks.close()


def test_a_message_that_is_there_does_not_overtake_one_in_the_store(breakable: ModuleType) -> None:
    receive_after_an_unexpected_message(Ranks(2))
    with pytest.raises(AssertionError, match=r"tag 1: \d+ of 8 bytes differ"):
        receive_after_an_unexpected_message(broken(breakable, OVERTAKING))


def test_a_receive_gets_a_message_that_is_still_arriving_in_the_store(pair: Ranks) -> None:
    large, small = numbers(RING), numbers(10)
    sent = [pair[0].isend(large, 1, tag=1)]
    impatient = Port(pair.mailboxes[1], Waiter(0))
    with pytest.raises(TimeoutError):
        # It takes all that there is of the large message into the store, and gives up.
        impatient.recv(like(small), 0, tag=2)
    assert pair.mailboxes[1].stored_bytes == large.nbytes
    received = like(large)
    pair[1].recv(received, 0, tag=1)
    await_all(sent)
    equal(received, large, "the large message")
    assert pair.mailboxes[1].stored_bytes == 0


def test_a_message_that_nobody_waits_behind_slows_its_sender(pair: Ranks) -> None:
    """Without this a fast sender would fill the receiver's memory."""
    hasty = Port(pair.mailboxes[0], Waiter(0.2))
    for _ in range(layout.SLOTS):
        hasty.send(numbers(1), 1)
    with pytest.raises(TimeoutError, match=r"send of 1 bytes to rank 1 \(tag 0\): blocked on 1"):
        hasty.send(numbers(1), 1)
    assert not hasty.waiter.aborts
    for _ in range(layout.SLOTS):
        pair[1].recv(like(numbers(1)), 0)
    hasty.send(numbers(2), 1, tag=3)
    pair[1].recv(like(numbers(2)), 0, tag=3)


def test_receives_get_messages_in_the_order_of_the_calls(pair: Ranks) -> None:
    targets = [like(numbers(4)) for _ in range(30)]
    transfers = [pair[1].irecv(target, None if turn % 3 else 0) for turn, target in enumerate(targets)]
    transfers += [pair[0].isend(numbers(4, turn), 1) for turn in range(30)]
    await_all(transfers)
    assert [int(target[0]) for target in targets] == list(range(30))
    assert all(transfer.source == 0 for transfer in transfers[:30])


def test_any_source_is_fair() -> None:
    ranks = Ranks(3)
    for source, _ in itertools.product((1, 2), range(5)):
        ranks[source].send(numbers(3, source), 0)
    sources = []
    for _ in range(10):
        received = like(numbers(3))
        sources.append(ranks[0].recv(received, None))
        assert received[0] == sources[-1]
    assert sources[:2] in ([1, 2], [2, 1])
    assert sources[::2] == [sources[0]] * 5
    ranks.close()


def test_many_in_flight_whatever_the_order(pair: Ranks) -> None:
    count = 1000
    sent = [numbers(40, tag % 200) for tag in range(count)]
    targets = [like(data) for data in sent]
    transfers = [pair[0].isend(data, 1, tag) for tag, data in enumerate(sent)]
    transfers += [pair[1].irecv(targets[tag], 0, tag) for tag in reversed(range(count))]
    await_all(transfers)
    for tag in range(count):
        equal(targets[tag], sent[tag], f"tag {tag}")


def test_both_send_first(pair: Ranks) -> None:
    """Two large messages that cross must not wait for each other's receive."""
    data = [numbers(2 << 20), numbers(2 << 20, 5)]
    targets = [like(data[1]), like(data[0])]
    transfers = [pair[rank].isend(data[rank], 1 - rank) for rank in (0, 1)]
    transfers += [pair[rank].irecv(targets[rank], 1 - rank) for rank in (0, 1)]
    await_all(transfers)
    equal(targets[0], data[1], "at rank 0")
    equal(targets[1], data[0], "at rank 1")


@pytest.mark.parametrize("length", [0, 5, 3 * RING])
def test_to_oneself(pair: Ranks, length: int) -> None:
    data, target, other = numbers(length), like(numbers(length)), like(numbers(length))
    pair[0].send(data, 0)
    early = pair[0].irecv(target, 0)
    late = pair[0].irecv(other, None)
    assert early.finished
    assert not late.finished
    await_all([pair[0].isend(data, 0), late])
    equal(target, data, "the one sent first")
    equal(other, data, "the one received first")
    assert late.source == 0
    assert pair.mailboxes[0].stored_bytes == 0


def test_done_is_called_once_with_the_transfer(pair: Ranks) -> None:
    calls: list[p2p.Transfer] = []
    received = pair[1].irecv(like(numbers(4)), 0, done=calls.append)
    sent = pair[0].isend(numbers(4), 1, done=calls.append)
    await_all([received, sent])
    pair.close()
    assert sorted(map(id, calls)) == sorted(map(id, (received, sent)))


# -- mismatches


@pytest.mark.parametrize("sent", [0, 5, 3 * RING])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_length_than_expected(pair: Ranks, sent: int, asynchronous: bool) -> None:
    message = numbers(sent)
    sending = pair[0].isend(message, 1, tag=4)
    target = like(numbers(24))
    with pytest.raises(DistBackendError) as caught:
        waited_for(asynchronous, pair[1], "recv", target, 0, 4)
    assert str(caught.value).startswith(
        f"group 'test', rank 1: rank 0 sent {message.nbytes} bytes of kind 0 with tag 4,"
        " but recv expected 24 bytes of kind 0"
    )
    assert (target == 0xEE).all()
    await_all([sending])
    pair[0].send(numbers(24), 1, tag=4)
    pair[1].recv(target, 0, tag=4)
    equal(target, numbers(24), "the next message")


def test_another_kind_than_expected(pair: Ranks) -> None:
    pair[0].send(numbers(8), 1, kind=3)
    with pytest.raises(DistBackendError, match=r"8 bytes of kind 3 .* expected 8 bytes of kind 5"):
        pair[1].recv(like(numbers(8)), None, kind=5)
    pair[0].send(numbers(8), 1, kind=5)
    assert pair[1].recv(like(numbers(8)), None, kind=5) == 0


def test_a_stored_message_is_compared_too(pair: Ranks) -> None:
    pair[0].send(numbers(8), 1, tag=1)
    pair[0].send(numbers(8), 1, tag=2)
    pair[1].recv(like(numbers(8)), 0, tag=2)
    with pytest.raises(DistBackendError, match=r"8 bytes of kind 0 with tag 1, but recv expected 9 bytes"):
        pair[1].recv(like(numbers(9)), 0, tag=1)
    assert pair.mailboxes[1].stored_bytes == 0


# -- giving up


def test_a_receive_that_got_nothing_leaves_everything_usable(pair: Ranks) -> None:
    impatient = Port(pair.mailboxes[1], Waiter(0.1))
    for asynchronous in (False, True):
        with pytest.raises(TimeoutError, match="recv of 4 bytes from any rank"):
            waited_for(asynchronous, impatient, "recv", like(numbers(4)), None)
    assert not impatient.waiter.aborts
    pair[0].send(numbers(4), 1)
    target = like(numbers(4))
    pair[1].recv(target, 0)
    equal(target, numbers(4), "a later message")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_half_a_message_breaks_the_channel_in_that_direction(pair: Ranks, asynchronous: bool) -> None:
    impatient = Port(pair.mailboxes[0], Waiter(0.1))
    with pytest.raises(TimeoutError):
        waited_for(asynchronous, impatient, "send", numbers(RING), 1)
    assert impatient.waiter.aborts == [
        "rank 0 left a send to rank 1 halfway, with TimeoutError:"
        " send of 1048576 bytes to rank 1 (tag 0): blocked on 1"
    ]
    with pytest.raises(GroupAbortedError, match=r"is impossible: rank 0 left a send to rank 1 halfway"):
        pair[0].send(numbers(4), 1)
    hasty = Port(pair.mailboxes[1], Waiter(0.1))
    with pytest.raises(TimeoutError):
        hasty.recv(like(numbers(RING)), 0)
    with pytest.raises(GroupAbortedError, match=r"rank 1 left a recv from rank 0 halfway"):
        pair[1].recv(like(numbers(4)), 0)
    pair[1].send(numbers(4), 0)
    pair[0].recv(like(numbers(4)), 1)


def test_a_signal_interrupts_a_wait(pair: Ranks) -> None:
    class Signalled(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Signalled

    waits = threading.Event()

    class Waits(Waiter):
        def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> None:
            super().check(doing, blocked, deadline, suspect)
            waits.set()

    def send_signal() -> None:
        assert waits.wait(LIMIT)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send_signal)
    sender.start()
    try:
        with pytest.raises(Signalled):
            Port(pair.mailboxes[1], Waits()).recv(like(numbers(4)), 0)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    pair[0].send(numbers(4), 1)
    pair[1].recv(like(numbers(4)), 0)


def test_signals_at_any_moment_lose_nothing(pair: Ranks) -> None:
    """A handler that raises in the middle of a wait: waiting again goes on where it was interrupted."""

    class Signalled(Exception):
        pass

    armed = False
    interruptions = 0

    def handler(number: int, frame: object) -> None:
        nonlocal armed, interruptions
        if armed:
            armed = False
            interruptions += 1
            raise Signalled

    def length(turn: int) -> int:
        return (5, 300, 70_000)[turn % 3]

    def echo() -> None:
        for turn in range(turns):
            data = like(numbers(length(turn)))
            pair[1].recv(data, 0)
            pair[1].send(data, 0)

    def exchange() -> None:
        nonlocal armed
        for turn in range(turns):
            data, target = numbers(length(turn), turn % 50), like(numbers(length(turn)))
            transfers = [pair[0].isend(data, 1), pair[0].irecv(target, 1)]
            while not all(transfer.finished for transfer in transfers):
                try:
                    armed = True
                    for transfer in transfers:
                        pair.mailboxes[0].wait(transfer)
                    armed = False
                except Signalled:
                    pass
            armed = False
            equal(target, data, f"turn {turn}")

    turns = 500
    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0003, 0.0003)
    try:
        for _ in range(40):  # of processor time alone, and in a wait: some ten times in so many turns
            peer = threading.Thread(target=echo)
            peer.start()
            exchange()
            peer.join(LIMIT)
            if interruptions:
                break
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert interruptions
    assert not pair.mailboxes[0]._pending


def interrupted(pair: Ranks, at: int) -> bool:
    """Exchange a message, and raise where a signal handler could when a wait has begun or ended ``at`` calls.

    Returns:
        Whether the wait made as many calls.
    """

    class Signalled(Exception):
        pass

    calls = itertools.count()

    # The peer answers only when the wait has begun: else there may be nothing left to wait for.
    has_begun = threading.Event()

    def raise_at(frame: object, event: str, argument: object) -> None:
        has_begun.set()
        if event in ("call", "c_return") and next(calls) == at:
            raise Signalled

    def echo() -> None:
        assert has_begun.wait(LIMIT)
        received = like(data)
        pair[1].recv(received, 0)
        pair[1].send(received, 0)

    data = numbers(70_000, at)
    target = like(data)
    transfers = [pair[0].isend(data, 1), pair[0].irecv(target, 1)]
    peer = threading.Thread(target=echo)
    peer.start()
    gc.disable()  # what a finalizer raises goes nowhere
    sys.setprofile(raise_at)
    try:
        for transfer in transfers:
            pair.mailboxes[0].wait(transfer)
    except Signalled:
        was_interrupted = True
    else:
        was_interrupted = False
    finally:
        sys.setprofile(None)
        gc.enable()
        has_begun.set()
    for transfer in transfers:
        pair.mailboxes[0].wait(transfer)
    peer.join(LIMIT)
    equal(target, data, f"interrupted at call {at}")
    return was_interrupted


def test_a_wait_can_be_interrupted_before_and_after_each_of_its_calls(pair: Ranks) -> None:
    pair.waiter.timeout_s = 30.0  # of a wait that would never end
    assert next(at for at in itertools.count() if not interrupted(pair, at)) > 20


def test_an_aborted_group_ends_a_wait_at_once(pair: Ranks) -> None:
    class Aborted(Waiter):
        def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> None:
            super().check(doing, blocked, deadline, suspect)
            if pair._memory[0]:
                raise GroupAbortedError("told")

    pair._memory[0] = 1
    for rank in (0, 1):
        port = Port(pair.mailboxes[rank], Aborted())
        with pytest.raises(GroupAbortedError, match="told"):
            port.recv(like(numbers(4)), 1 - rank)
        with pytest.raises(GroupAbortedError, match="told"):
            await_all([port.irecv(like(numbers(4)), 1 - rank)])


# -- threads of one rank


def test_threads_of_a_rank_do_not_wait_for_each_other(pair: Ranks) -> None:
    """One is in recv; another sends what makes the peer answer the first."""
    answer = like(numbers(RING))
    inside = threading.Event()

    class Inside(Waiter):
        def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> None:
            super().check(doing, blocked, deadline, suspect)
            inside.set()

    receiver = threading.Thread(target=Port(pair.mailboxes[0], Inside()).recv, args=(answer, 1, 1))
    receiver.start()
    assert inside.wait(LIMIT)
    pair[0].send(numbers(4), 1, tag=2)
    pair[1].recv(like(numbers(4)), 0, tag=2)
    pair[1].send(numbers(RING), 0, tag=1)
    receiver.join(LIMIT)
    equal(answer, numbers(RING), "the answer")
    pair[0].send(numbers(4), 1)
    pair[1].recv(like(numbers(4)), 0)


def test_many_threads_call_at_once(pair: Ranks) -> None:
    failures: list[BaseException] = []

    def talk(rank: int, tag: int) -> None:
        try:
            for turn in range(50):
                data, target = numbers(50 + turn, tag), like(numbers(50 + turn))
                if rank == 0:
                    pair[0].send(data, 1, tag)
                pair[rank].recv(target, 1 - rank, tag)
                if rank == 1:
                    pair[1].send(data, 0, tag)
                equal(target, data, f"tag {tag}, turn {turn}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(rank, tag)) for rank in (0, 1) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not failures


def test_waiting_costs_next_to_no_processor_time(pair: Ranks) -> None:
    waiter = Waiter()
    port = Port(pair.mailboxes[1], waiter)
    transfer = port.irecv(like(numbers(4)), 0)
    share = 1.0
    for turn in range(1, 11):  # what else this process does, and the host, can only add to it
        wall, used = time.monotonic(), time.process_time()
        while waiter.checks < 6 * turn:
            time.sleep(0.01)
        share = min(share, (time.process_time() - used) / (time.monotonic() - wall))
        if share < 0.3:
            break
    assert share < 0.3
    pair[0].send(numbers(4), 1)
    await_all([transfer])


def test_close_ends_what_is_under_way(pair: Ranks) -> None:
    under_way = [pair[0].irecv(like(numbers(4)), 1), pair[0].isend(numbers(RING), 1)]
    failures: list[BaseException] = []
    inside = threading.Event()

    class Inside(Waiter):
        def check(self, doing: str, blocked: int | None, deadline: Deadline, suspect: int | None) -> None:
            super().check(doing, blocked, deadline, suspect)
            inside.set()

    def receive() -> None:
        try:
            Port(pair.mailboxes[1], Inside()).recv(like(numbers(4)), 1)
        except GroupDestroyedError as error:
            failures.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    assert inside.wait(LIMIT)
    pair.close()
    receiver.join(LIMIT)
    assert len(failures) == 1
    for transfer in under_way:
        assert isinstance(transfer.error, GroupDestroyedError)
    own = {
        thread.name for thread in threading.enumerate() if thread.name.startswith("torchestra-messages-test-")
    }
    assert not own
    with pytest.raises(
        GroupDestroyedError, match=r"send of 4 bytes to rank 1 \(tag 0\), but the group was destroyed"
    ):
        pair[0].send(numbers(4), 1)


def test_the_area_is_small_enough_to_map() -> None:
    assert p2p.channel_area_bytes(64) <= 4 << 30
    assert p2p.channel_area_bytes(512) <= 8 << 30
    for size in (1, 2, 3, 64, 100):
        assert p2p.channel_area_bytes(size) % layout.PAGE == 0
