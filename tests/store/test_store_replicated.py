"""A replicated store goes on without a minority of its replicas, and nothing is done twice or forgotten."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from replicas import ReplicaProcesses, replicas_here, takes_part

from torchestra.errors import DistNetworkError, InvalidArgumentError, StoreTimeoutError
from torchestra.store import PrefixStore, ReplicatedStore, StoreReplica
from torchestra.store.base import pauses
from torchestra.store.replicated import refreshing, server, sessions
from torchestra.store.replicated.addresses import Addresses
from torchestra.store.replicated.client import LostReplica
from torchestra.store.tcp.protocol import Request

LONG = 30.0


@pytest.fixture
def processes() -> Iterator[ReplicaProcesses]:
    replicas = ReplicaProcesses(3)
    yield replicas
    replicas.close()


@dataclass(frozen=True)
class Swap:
    """A compare_set: between ``began`` and ``ended`` it expected a value, wished one, and was told one."""

    began: float
    ended: float
    expected: bytes
    wished: bytes
    told: bytes


def check_register(history: list[Swap], last: bytes) -> None:
    """Check that a register's history is linearizable, where no two swaps wish the same value.

    The swaps that were made form one chain from the empty value to the last. Real time does not contradict
    it: none ended before one began that stands earlier. What a failed swap was told was there meanwhile.
    """
    made = {swap.expected: swap for swap in history if swap.told == swap.wished}
    assert len(made) == sum(swap.told == swap.wished for swap in history), "two swaps replaced one value"
    chain, value = [], b""
    while value in made:
        chain.append(made[value])
        value = made[value].wished
    assert value == last
    assert len(chain) == len(made), "a swap was forgotten"
    latest_begin = 0.0
    for swap in chain:
        latest_begin = max(latest_begin, swap.began)
        assert swap.ended > latest_begin, "a later swap had ended before an earlier one began"
    came = {b"": 0.0, **{swap.wished: swap.began for swap in chain}}
    went = {swap.expected: swap.ended for swap in chain}
    for swap in history:
        if swap.told != swap.wished:
            assert swap.ended >= came[swap.told], "a value was read before it was written"
            assert swap.began <= went.get(swap.told, float("inf")), "a value was read after it was replaced"


def test_the_checker_finds_a_lost_and_a_doubled_swap() -> None:
    one, two = Swap(0, 1, b"", b"a", b"a"), Swap(2, 3, b"", b"b", b"b")
    check_register([one], b"a")
    with pytest.raises(AssertionError, match="two swaps replaced"):
        check_register([one, two], b"b")
    with pytest.raises(AssertionError, match="read after"):
        check_register([one, Swap(2, 3, b"a", b"c", b"c"), Swap(4, 5, b"x", b"y", b"a")], b"c")


def act(addresses: list[str], client: int, goes_on: Callable[[], bool]) -> tuple[list[int], list[Swap]]:
    """Add, append and swap as long as the test wants; return the sums, and the history of the register."""
    store = ReplicatedStore(addresses, LONG)
    sums, swaps, value = [], [], b""
    while goes_on():
        sums.append(store.add("sum", 1))
        store.append("text", f"{client}.{len(sums)} ")
        wished = f"{client}/{len(sums)}".encode()
        began = time.monotonic()
        told = store.compare_set("register", value, wished)
        swaps.append(Swap(began, time.monotonic(), value, wished, told))
        value = told
    store.close()
    return sums, swaps


def test_primaries_are_killed_while_clients_add_append_and_swap(processes: ReplicaProcesses) -> None:
    """Each replica is killed while it serves, and comes back with nothing: exactly once, and linearizable."""
    ended = threading.Event()
    store = ReplicatedStore(processes.addresses, LONG)
    with ThreadPoolExecutor(4) as threads:
        acting = [
            threads.submit(act, processes.addresses, client, lambda: not ended.is_set())
            for client in range(4)
        ]
        for victim in (0, 1, 2, 0):
            goal = store.add("sum", 0) + 40
            while store.add("sum", 0) < goal:
                assert not any(each.done() for each in acting)
            processes.kill(victim)
            store.set(f"without/{victim}", "goes on")
            processes.restart(victim)
            await_replicas(processes)
        ended.set()
        results = [each.result(LONG) for each in acting]
    sums = sorted(total for totals, _ in results for total in totals)
    assert sums == list(range(1, len(sums) + 1))
    assert store.get("sum") == str(len(sums)).encode()
    words = store.get("text").split()
    assert sorted(words) == sorted(
        f"{client}.{turn}".encode()
        for client, (totals, _) in enumerate(results)
        for turn in range(1, len(totals) + 1)
    )
    check_register([swap for _, swaps in results for swap in swaps], store.get("register"))
    store.close()


@pytest.fixture
def soon_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients soon learn where the replicas are that have taken others' places."""
    monkeypatch.setattr(refreshing, "_EVERY_S", 0.2)


@pytest.mark.usefixtures("soon_learned")
def test_replicas_are_lost_one_after_another_and_others_take_their_places() -> None:
    """All with which the store began are lost at last: clients find those that are there now."""
    processes, ended = ReplicaProcesses(3), threading.Event()
    store, idle = (ReplicatedStore(processes.addresses, LONG) for _ in range(2))
    with contextlib.closing(processes), ThreadPoolExecutor(2) as threads:
        acting = [
            threads.submit(act, processes.addresses, client, lambda: not ended.is_set())
            for client in range(2)
        ]
        try:
            for victim in (0, 2, 1, 0):
                goal = store.add("sum", 0) + 40
                while store.add("sum", 0) < goal:
                    assert not any(each.done() for each in acting)
                processes.kill(victim)
                assert processes.replace(store) == victim
                await_replicas(processes)
        finally:
            ended.set()
        results = [each.result(LONG) for each in acting]
        sums = sorted(total for totals, _ in results for total in totals)
        assert sums == list(range(1, len(sums) + 1))
        check_register([swap for _, swaps in results for swap in swaps], store.get("register"))
        newcomer = ReplicatedStore(processes.addresses, LONG)
        assert list(newcomer.addresses) == list(store.addresses) == processes.addresses
        assert newcomer.get("sum") == idle.get("sum") == str(len(sums)).encode()
        idle.close()


@pytest.mark.usefixtures("soon_learned")
def test_a_replica_that_was_only_stopped_does_no_harm_when_another_has_its_place(
    processes: ReplicaProcesses,
) -> None:
    store = ReplicatedStore(processes.addresses, LONG)
    store.set("k", "v")
    stopped, address = processes.processes[1], processes.addresses[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    assert processes.replace(store) == 1
    await_replicas(processes)
    store.set("k", "w")
    os.kill(stopped.pid, signal.SIGCONT)
    until = time.monotonic() + LONG
    while not _is_answered_nothing(address):
        assert store.get("k") == b"w"
        assert time.monotonic() < until
    processes.kill(0)  # the primary: the new one is the next
    store.set("k", "x")
    assert ReplicatedStore(processes.addresses, LONG).get("k") == b"x"


def _is_answered_nothing(address: str) -> bool:
    """Return whether a replica that runs has neither a place in the store nor knows the primary."""
    pool = sessions.SessionPool(Addresses([address]), None, "probe")
    try:
        pool.request(Request.CHECK, [], 0.0, 0.0)
    except DistNetworkError as error:
        return "knows of no primary" in str(error)
    finally:
        pool.close()
    return False


@pytest.mark.usefixtures("soon_learned")
def test_who_is_heard_is_not_replaced_and_an_address_gets_one_place() -> None:
    with replicas_here(5) as (served, addresses):
        store = ReplicatedStore(addresses, LONG)
        assert store.replace_lost("127.0.0.1:1", 30.0) is None
        for index in (3, 4):
            served[index].close()
        first, second = (_lost(store, f"127.0.0.1:{port}") for port in (1, 2))
        assert {first.index, second.index} == {3, 4}
        assert (first.generation, second.generation) == (1, 1)
        assert store.replace_lost("127.0.0.1:1", 2.0) == replace(first, addresses=store.addresses)
        assert store.replace_lost("127.0.0.1:3", 30.0) is None
        with pytest.raises(InvalidArgumentError, match="host:port"):
            store.replace_lost("nobody", 2.0)
        store.close()


def _lost(store: ReplicatedStore, address: str) -> LostReplica:
    for _ in pauses(LONG):
        if (lost := store.replace_lost(address, 0.0)) is not None:
            return lost
    raise AssertionError


def test_a_generation_is_of_one_that_recovers() -> None:
    with pytest.raises(InvalidArgumentError, match="generation"):
        StoreReplica(0, ["127.0.0.1:1"], generation=1)
    with pytest.raises(InvalidArgumentError, match="generation"):
        StoreReplica(0, ["127.0.0.1:1"], recovering=True, generation=1 << 15)


def await_replicas(processes: ReplicaProcesses) -> None:
    """Wait until all replicas take part: each answers a client, or sends it to the primary."""
    for address in processes.addresses:
        until = time.monotonic() + LONG
        while not takes_part(address):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_waits_survive_the_primary(processes: ReplicaProcesses) -> None:
    store = PrefixStore("p", ReplicatedStore(processes.addresses, LONG))
    store.set("here", "1")
    with ThreadPoolExecutor(3) as threads:
        waits = [
            threads.submit(store.get, "late"),
            threads.submit(store.wait, ["late", "here"], LONG),
            threads.submit(store.queue_pop, "queue"),
        ]
        processes.kill(0)
        store.set("late", "x")
        store.queue_push("queue", "y")
        assert [each.result(LONG) for each in waits] == [b"x", None, b"y"]
    with pytest.raises(StoreTimeoutError, match="never"):
        store.wait(["never"], 0.05)


def test_without_a_majority_the_error_names_who_is_out_of_reach(
    processes: ReplicaProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "NO_PRIMARY_SECONDS", 1.5)  # long enough to ask all
    store = ReplicatedStore(processes.addresses, LONG)
    store.set("k", "v")
    processes.kill(0)
    processes.kill(2)
    with pytest.raises(DistNetworkError, match="no primary for") as caught:
        store.get("k")
    text = str(caught.value)
    named = re.findall(r"replica (\d) at \S+ is out of reach", text)
    assert named == ["0", "2"]
    assert "a majority (2 of 3) is needed, and 1 can be reached" in text
    processes.restart(0)  # what was held is lost with the majority: it is not made up
    with pytest.raises(DistNetworkError, match="no primary for"):
        store.get("k")


def test_five_replicas_bear_two_losses_at_once() -> None:
    with replicas_here(5) as (served, addresses):
        store = ReplicatedStore(addresses, LONG)
        store.set("k", "v")
        served[0].close()
        served[1].close()
        assert store.get("k") == b"v"
        assert store.add("n", 1) == 1
        store.close()


def test_a_change_that_replicas_could_not_tell_each_other_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_REQUEST", 1000)
    with replicas_here(3) as (_, addresses):
        store = ReplicatedStore(addresses, LONG)
        with pytest.raises(InvalidArgumentError, match="at most 1000 bytes, got 1001"):
            store.set("k", bytes(1000))
        store.set("k", bytes(999))
        assert store.get("k") == bytes(999)
        store.close()


@pytest.mark.parametrize("addresses", [[], "127.0.0.1:1", ["nohost"], ["h:1", "h:1"], ["h:0"]])
def test_wrong_addresses_are_refused(addresses: list[str]) -> None:
    with pytest.raises(InvalidArgumentError):
        ReplicatedStore(addresses, 0.1)
    with pytest.raises(InvalidArgumentError):
        StoreReplica(0, addresses)


def test_a_client_without_the_secret_is_refused() -> None:
    with replicas_here(1, "the secret") as (_, addresses):
        with pytest.raises(DistNetworkError, match="secret"):
            ReplicatedStore(addresses, LONG, secret="another")
        store = ReplicatedStore(addresses, LONG, secret="the secret")
        store.set("k", "v")
        assert store.get("k") == b"v"
        store.close()


def test_a_connection_to_another_replica_that_comes_after_the_end_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended, made = threading.Semaphore(0), threading.Event(), list[socket.socket]()

    class Late:
        def __init__(self, *_: object) -> None:
            begun.release()
            assert ended.wait(LONG)

        def detach(self) -> socket.socket:
            made.append(socket.socket())
            return made[-1]

    monkeypatch.setattr(server, "Connection", Late)
    before = set(threading.enumerate())
    with replicas_here(2) as (replicas, _):
        for _ in replicas:
            assert begun.acquire(timeout=LONG)
        for replica in replicas:
            replica.close()
        ended.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(LONG)
    assert [each.fileno() for each in made] == [-1, -1]
