"""Point-to-point messages between mailboxes: matching, mismatches, threads of one rank, closing."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from mailboxes import LIMIT, RING, Port, Ranks, Waiter, await_all, equal, like, numbers, waited_for

from torchestra.engine.p2p import kernels, layout
from torchestra.engine.p2p.transfer import Transfer
from torchestra.errors import DistBackendError, GroupDestroyedError
from torchestra.system.deadline import Deadline


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
    calls: list[Transfer] = []
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


def test_a_message_that_comes_as_its_receive_is_given_up_ends_that_receive_alone(pair: Ranks) -> None:
    """The receive's record was used again before its end was noted: by that end a later receive was over."""
    mailbox, holder, patience, data = pair.mailboxes[1], 1 << 40, Waiter(), numbers(5)
    first, second, third = like(data), like(data), like(data)
    given_up = Port(mailbox, patience).irecv(first, 0, tag=1)
    while not kernels.try_acquire(mailbox.address, holder):  # nobody works until this is released
        kernels.call_attention(mailbox.address)
        time.sleep(0.001)
    pair[0].send(data, 1, tag=1)
    before = pair[1].irecv(second, 0, tag=2)  # to post it, the mailbox looks for messages
    patience.timeout_s = 0
    while given_up.withdrawn is None:
        time.sleep(0.001)
    after = pair[1].irecv(third, 0, tag=3)
    kernels.release(mailbox.address, holder)
    mailbox.check()
    assert given_up.finished
    assert not before.finished
    assert not after.finished
    pair[0].send(data, 1, tag=2)
    pair[0].send(data, 1, tag=3)
    await_all([before, after])
    equal(third, data, "the message of the later receive")


def test_the_area_is_small_enough_to_map() -> None:
    assert layout.channel_area_bytes(64) <= 4 << 30
    assert layout.channel_area_bytes(512) <= 8 << 30
    for size in (1, 2, 3, 64, 100):
        assert layout.channel_area_bytes(size) % layout.PAGE == 0
