"""Who is given a group's memory, and who cannot keep the ranks from getting it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchestra as dist
from forking import Child
from torchestra.engine.memory import fd_passing as module
from torchestra.engine.memory.fd_passing import DescriptorServer, fetch
from torchestra.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError
from torchestra.store import FileStore
from torchestra.system.deadline import Deadline
from worlds import outcomes, results

LONG = 60.0
NOBODY = 65534
SECRET = b"between us"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHESTRA_SECRET", raising=False)


@contextlib.contextmanager
def handing_out(
    size: int, secret: bytes | None = SECRET
) -> Iterator[tuple[DescriptorServer, Callable[[], None]]]:
    """A hand-over of a file of two bytes that goes on in a thread; the function waits for its end."""
    descriptor = os.memfd_create("torchestra-test", os.MFD_CLOEXEC)
    os.write(descriptor, b"ok")
    stop = threading.Event()

    def serve() -> None:
        while admission.waited_for and not stop.is_set():
            admission.serve(descriptor)

    with DescriptorServer(range(1, size), secret, "g") as admission, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve)
        try:
            yield admission, lambda: serving.result(LONG)
        finally:
            stop.set()
            serving.result(LONG)
            os.close(descriptor)


def got(
    admission: DescriptorServer, rank: int, secret: bytes | None = SECRET, seconds: float = LONG
) -> bytes:
    """Return what is in the file that a rank is given."""
    descriptor = fetch(admission.invitation, secret, rank, "g", Deadline(seconds))
    try:
        assert not os.get_inheritable(descriptor)
        return os.pread(descriptor, 10, 0)
    finally:
        os.close(descriptor)


def stranger(admission: DescriptorServer, *packets: bytes) -> socket.socket:
    """A connection of somebody else's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(LONG)
    connection.connect("\0" + admission.invitation.partition(":")[0])
    with contextlib.suppress(ConnectionError):
        for packet in packets:
            connection.send(packet)
    return connection


def hello(rank: int = 1, nonce: bytes = bytes(32)) -> bytes:
    return b"TRC2" + struct.pack("<I", rank) + nonce


@pytest.mark.parametrize("secret", [SECRET, None])
def test_every_rank_is_given_the_memory_once(secret: bytes | None) -> None:
    with handing_out(8, secret) as (admission, wait), ThreadPoolExecutor(7) as threads:
        assert list(threads.map(lambda rank: got(admission, rank, secret), range(1, 8))) == [b"ok"] * 7
        wait()
        assert admission.waited_for == set()


@pytest.mark.parametrize("rank", [1, 9])
def test_a_rank_that_has_been_served_or_does_not_exist_is_refused(rank: int) -> None:
    with handing_out(3) as (admission, _):
        got(admission, 1)
        with pytest.raises(DistBackendError, match=rf"rank {rank} of .*two processes claim the same rank"):
            got(admission, rank)
        got(admission, 2)


@pytest.mark.parametrize("mine", [b"another job's", None])
def test_a_rank_with_another_secret_finds_that_out_and_is_logged(
    mine: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with handing_out(2) as (admission, wait):
        words = r"rank 1 of group 'g': what answers in rank 0's place does not know this rank's secret"
        with pytest.raises(DistBackendError, match=words):
            got(admission, 1, mine)
        assert got(admission, 1) == b"ok"
        wait()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert "a process that says it is rank 1 does not know the group's key" in lines[0]


def test_the_token_is_needed_as_well() -> None:
    """It is told in the store, so it shows that a process can read that."""
    with handing_out(2, None) as (admission, _):
        address = admission.invitation.partition(":")[0]
        with pytest.raises(DistBackendError, match="does not know this rank's secret"):
            fetch(f"{address}:{'0' * 64}", None, 1, "g", Deadline(LONG))
        got(admission, 1, None)


def test_strangers_that_come_first_hold_up_no_rank() -> None:
    """They say nothing, half of it, nonsense, or all but the proof, and stay."""
    with handing_out(5) as (admission, wait):
        crowd = [
            stranger(admission, *packets)
            for _ in range(60)
            for packets in ((), (b"",), (b"x" * 10,), (hello()[:-1],), (hello(),), (hello(2), b"x" * 32))
        ]
        for rank in range(1, 5):
            assert got(admission, rank) == b"ok"
        wait()
    for connection in crowd:
        with connection, contextlib.suppress(ConnectionError):
            while packet := connection.recv(100):
                assert not packet.startswith(b"given")


def test_a_silent_stranger_has_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROOF_SECONDS", 0.0)
    with handing_out(2) as (admission, _), stranger(admission) as connection:
        assert connection.recv(1) == b""


def test_a_proof_is_good_for_one_connection_only() -> None:
    with handing_out(2) as (admission, _):
        nonce = b"n" * 32
        token = admission.invitation.partition(":")[2]
        with stranger(admission, hello(1, nonce)) as first:
            challenge = first.recv(100)[:32]
        heard = module._proof(module._key(token, SECRET), "rank", 1, nonce + challenge)
        with stranger(admission, hello(1, nonce)) as second:
            assert second.recv(100)[:32] != challenge
            second.send(heard)
            assert second.recv(100) == b"unproved"
        # What rank 0 itself has said is no proof of being a rank.
        with stranger(admission, hello(1, nonce)) as third:
            third.send(third.recv(100)[32:])
            assert third.recv(100) == b"unproved"
        got(admission, 1)


packets = st.lists(
    st.one_of(
        st.binary(max_size=80),
        st.binary(min_size=32, max_size=32),
        st.tuples(st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32)).map(
            lambda pair: hello(*pair)
        ),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=packets)
def test_whatever_is_said_nothing_is_given_and_ranks_are_served(said: list[bytes]) -> None:
    with handing_out(2) as (admission, wait), stranger(admission, *said) as connection:
        connection.setblocking(False)
        assert got(admission, 1) == b"ok"
        wait()
        with contextlib.suppress(OSError):
            while packet := connection.recv(100):
                assert not packet.startswith(b"given")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user too")
def test_another_users_process_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Even if it knows everything."""

    def ask() -> str:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with pytest.raises(DistBackendError) as caught:
            fetch(admission.invitation, SECRET, 1, "g", Deadline(LONG))
        return str(caught.value)

    def ask_without_looking() -> bytes:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with stranger(admission, hello()) as connection, contextlib.suppress(ConnectionError):
            return connection.recv(100)
        return b""

    with handing_out(2) as (admission, _):
        assert "is a process of another user (number 0)" in Child(ask).result()
        assert Child(ask_without_looking).result() == b""
        got(admission, 1)
    assert f"a process of user {NOBODY} wanted the group's memory" in caplog.text


Turn = Callable[[socket.socket, bytes], object]

# In rank 0's place -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def impostor(*turns: Turn) -> Iterator[str]:
    """Somebody who listens where rank 0 should, and does one thing per connection; the invitation."""
    address = f"torchestra-test-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind("\0" + address)
        listener.listen()

        def serve() -> None:
            for turn in turns:
                connection, _ = listener.accept()
                with connection:
                    said = connection.recv(100)
                    turn(connection, said)

        serving = threads.submit(serve)
        yield f"{address}:token"
        serving.result(LONG)


def reflect(connection: socket.socket, said: bytes) -> None:
    connection.send(said[-32:] + said[-32:])
    connection.recv(100)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda connection, _: connection.send(b"x" * 64),
            "does not know this rank's secret, and is not trusted",
        ),
        (reflect, "does not know this rank's secret, and is not trusted"),
        (lambda connection, _: connection.send(b"given"), "does not speak this rank's protocol"),
        (lambda connection, _: connection.send(b"x" * 200), "does not speak this rank's protocol"),
    ],
    ids=["nonsense", "reflection", "a gift", "too much"],
)
def test_an_impostor_is_not_believed(answer: Turn, words: str) -> None:
    with impostor(answer) as invitation, pytest.raises(DistBackendError, match=words):
        fetch(invitation, SECRET, 1, "g", Deadline(LONG))


def test_what_an_impostor_hands_over_is_not_taken() -> None:
    read, write = os.pipe()

    def give(connection: socket.socket, _: bytes) -> None:
        socket.send_fds(connection, [b"x" * 64], [write])

    with impostor(give) as invitation, pytest.raises(DistBackendError, match="is not trusted"):
        fetch(invitation, SECRET, 1, "g", Deadline(LONG))
    os.close(write)
    # Were the other end still open in this process, this would wait.
    assert os.read(read, 1) == b""
    os.close(read)


def test_an_impostor_that_says_nothing_is_a_time_out() -> None:
    done = threading.Event()
    with impostor(lambda *_: done.wait(LONG)) as invitation:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 did not give it the group's memory in time"):
            fetch(invitation, SECRET, 1, "g", Deadline(0.1))
        done.set()


def test_a_rank_that_was_dropped_comes_again() -> None:
    """Rank 0 drops connections when there are too many."""
    descriptor = os.memfd_create("torchestra-test", os.MFD_CLOEXEC)

    def drop_late(connection: socket.socket, said: bytes) -> None:
        proof = module._proof(module._key("token", SECRET), "rank 0", 1, said[8:] + bytes(32))
        connection.send(bytes(32) + proof)
        connection.recv(100)

    def give(connection: socket.socket, said: bytes) -> None:
        nonces = said[8:] + bytes(32)
        key = module._key("token", SECRET)
        connection.send(bytes(32) + module._proof(key, "rank 0", 1, nonces))
        assert connection.recv(100) == module._proof(key, "rank", 1, nonces)
        socket.send_fds(connection, [b"given"], [descriptor])

    with impostor(lambda *_: None, drop_late, give) as invitation:
        os.close(fetch(invitation, SECRET, 1, "g", Deadline(LONG)))
    os.close(descriptor)


def test_rank_0_that_is_gone_is_told_at_once() -> None:
    with DescriptorServer([1], SECRET, "g") as admission:
        invitation = admission.invitation
    with pytest.raises(DistBackendError, match="rank 1 of group 'g' cannot reach rank 0 on this host"):
        fetch(invitation, SECRET, 1, "g", Deadline(LONG))


# In a world ------------------------------------------------------------------------------------------------


def _joined(store: FileStore, rank: int, size: int, *secrets: str) -> list[int]:
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=LONG, secret=secrets[rank])
    dist.new_group([1, 0], sort_ranks=False)
    return [rank]


def test_ranks_join_by_their_secret_and_their_groups_do_too() -> None:
    ended = outcomes("processes", 2, _joined, "same", "same", init=False)
    assert results(ended) == [[0], [1]]


def test_ranks_with_different_secrets_do_not_join() -> None:
    """Rank 0 does not wait out its time for the rank that it has turned away."""
    ended = outcomes("processes", 2, _joined, "one", "other", init=False)
    why = "does not know this rank's secret, and is not trusted; set TORCHESTRA_SECRET"
    assert isinstance(ended[1].error, DistBackendError)
    assert why in ended[1].message
    assert isinstance(ended[0].error, GroupAbortedError)
    assert "rank 1 could not enter it: DistBackendError: " in ended[0].message
    assert why in ended[0].message
