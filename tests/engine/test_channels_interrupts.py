"""What ends or interrupts a wait for a message: a deadline, half a message, a signal, an abort."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading

import pytest
from mailboxes import LIMIT, RING, Port, Ranks, Waiter, await_all, equal, like, numbers, waited_for

from torchestra.errors import GroupAbortedError
from torchestra.system.deadline import Deadline


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
