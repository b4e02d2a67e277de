"""Random messages between mailboxes, against a reference; and that a broken protocol is seen."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mailboxes import LIMIT, RING, Port, Ranks, await_all, equal, like, numbers

from torchestra.engine.p2p import layout
from torchestra.errors import DistBackendError, GroupDestroyedError

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
        Path(layout.__file__).parent, folder / "breakable", ignore=shutil.ignore_patterns("__pycache__")
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
        yield import_module("breakable.mailbox")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "breakable"]:
            del sys.modules[name]


def broken(package: ModuleType, how: int, size: int = 2, **options: int) -> Ranks:
    ranks = Ranks(size, package.Mailbox, **options)
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
