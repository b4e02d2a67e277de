"""A lock that is taken if it is free: no interrupt leaves it taken, or releases what another thread has.

It comes at every single point of the lock's users at which one can.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from interrupts import interrupted_at
from torchestra.engine.membership import shrinking
from torchestra.engine.p2p import endpoint
from torchestra.engine.p2p.endpoint import Endpoint, _SendQueue
from torchestra.errors import InvalidArgumentError
from torchestra.rpc import leader_followers as pool_file
from torchestra.rpc.leader_followers import LeaderFollowersPool
from torchestra.system import try_lock
from torchestra.system.try_lock import TryLock


def set_holder(lock: TryLock, claim: object) -> None:
    if claim is not None:
        lock.holder = claim
    elif lock.holder is not None:
        del lock.holder


def interrupt_everywhere(
    call: Callable[[], object], locks: list[TryLock], files: list[str], taken: bool = False
) -> None:
    """Call it until it has been interrupted everywhere, the locks being free, or taken by somebody else."""
    other = object() if taken else None
    for place in itertools.count():
        for lock in locks:
            set_holder(lock, other)
        with (
            contextlib.suppress(KeyboardInterrupt, InvalidArgumentError),
            interrupted_at(place, [try_lock.__file__, *files]) as where,
        ):
            call()
        assert all(lock.holder is other for lock in locks), where
        if not where:
            break
    assert place > 2


def test_only_one_claim_has_it() -> None:
    lock, first, second = TryLock(), object(), object()
    assert lock.take(first)
    assert not lock.take(second)
    assert lock.holder is first
    del lock.holder
    assert lock.take(second)


def test_of_many_threads_one_has_it_at_a_time() -> None:
    lock, inside, most = TryLock(), [0], [0]

    def work() -> None:
        claim = object()
        for _ in range(300):
            if lock.take(claim):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
                del lock.holder

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert lock.holder is None


@pytest.mark.parametrize("taken", [False, True])
def test_of_shrinking_a_group(taken: bool) -> None:
    context: Any = SimpleNamespace(shrinking=TryLock(), name="group")
    interrupt_everywhere(
        lambda: shrinking.run_alone(context, 0, lambda: None),
        [context.shrinking],
        [shrinking.__file__],
        taken,
    )


@pytest.mark.parametrize("taken", [False, True])
def test_of_sending_to_a_worker(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    worker, queue, sent = Endpoint.__new__(Endpoint), _SendQueue(), []
    worker._send_queues = [queue]
    monkeypatch.setattr(Endpoint, "_push", lambda _, peer, queue, message: sent.append(message[1]))
    numbers = itertools.count()
    interrupt_everywhere(
        lambda: worker.send(0, 1, next(numbers), ()), [queue.lock], [endpoint.__file__], taken
    )
    set_holder(queue.lock, None)
    queue.messages.append((1, next(numbers), (), None))
    worker.send_leftovers()
    assert sent == sorted(sent)
    assert sent[-1] == next(numbers) - 1
    assert not queue.messages


class SilentEndpoint:
    """One to which no message comes."""

    def __init__(self) -> None:
        self.in_hand = None
        self.awaited = SimpleNamespace(finished=False, leading=False, latch=None)

    def receive(self, *, eager: bool) -> None:
        self.awaited.finished = True

    def wake_leader(self) -> None:
        pass


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("what", ["wait", "check", "drain"])
def test_of_waiting_for_an_answer(monkeypatch: pytest.MonkeyPatch, what: str, taken: bool) -> None:
    for constant in ("_CHECK_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(pool_file, constant, 0.0)
    monkeypatch.setattr(LeaderFollowersPool, "leave", lambda self, job: job())
    monkeypatch.setattr(LeaderFollowersPool, "_wake_idle", lambda self: None)
    endpoint: Any = SilentEndpoint()
    pool = LeaderFollowersPool("of a test", endpoint, lambda _: (False, pool_file.Job), lambda: None, 1, 1)
    checks = itertools.count()

    def call() -> None:
        endpoint.awaited.finished = False
        if what != "wait":
            getattr(pool, what)()
            return
        if taken:
            pool._check = lambda: setattr(endpoint.awaited, "finished", next(checks) % 3 == 2)
            set_holder(pool._checking, None)
        pool.wait(endpoint.awaited)

    locks = [pool._leader] if taken else [pool._leader, pool._checking, pool._follower]
    interrupt_everywhere(call, locks, [pool_file.__file__], taken)
    assert pool._waiting == []
    assert not pool._draining
    assert not endpoint.awaited.leading
