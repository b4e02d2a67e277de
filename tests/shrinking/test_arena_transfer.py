"""A new arena goes to ranks that know the key and to nobody else, and leaves nothing if it is not wanted."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from torchestra.engine.membership import arena_transfer
from torchestra.engine.membership.arena_transfer import ArenaOffer, ArenaTransfer, make_offer, make_request
from torchestra.errors import DistNetworkError

SOON = 20.0


@pytest.fixture(params=[False, True], ids=["processes", "threads"])
def threads(request: pytest.FixtureRequest) -> bool:
    return request.param


def sockets_of(key: bytes) -> list[str]:
    with open("/proc/net/unix") as file:
        return [line for line in file if key[:16].hex() in line]


def until(found: Callable[[], ArenaTransfer | None], offer: ArenaOffer) -> ArenaTransfer:
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        offer.serve()
        if (transfer := found()) is not None:
            return transfer
        time.sleep(0.001)
    raise AssertionError("nothing came")


def answer_in_background(key: bytes, threads: bool) -> Callable[[], ArenaTransfer | None]:
    """Ask from another thread, as both sides would wait for each other on one."""
    request, got = make_request(key, 1, 2, "g", threads=threads), []

    def ask() -> None:
        deadline = time.monotonic() + SOON
        while not got and time.monotonic() < deadline:
            if (transfer := request.answer()) is not None:
                got.append(transfer)
        request.close()

    threading.Thread(target=ask, daemon=True).start()
    return lambda: got[0] if got else None


def test_who_has_the_key_gets_the_same_memory_and_store(threads: bool) -> None:
    offer = make_offer(2, "g", threads=threads)
    try:
        transfer = until(answer_in_background(offer.key, threads), offer)
        offer.transfer.arena.store_word(4096, 77)
        assert transfer.arena.load_word(4096) == 77
        assert (transfer.arena is offer.transfer.arena) == threads
        offer.transfer.store.set("key", b"value")
        assert transfer.store.get("key") == b"value"
        transfer.abandon()
    finally:
        offer.close()
        offer.transfer.abandon()


def test_nothing_is_left_of_an_offer_that_was_not_taken(threads: bool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    offer = make_offer(2, "g", threads=threads)
    assert bool(sockets_of(offer.key)) != threads
    offer.close()
    offer.close()
    offer.transfer.abandon()
    key = offer.key
    del offer
    gc.collect()
    assert sockets_of(key) == []
    assert key not in arena_transfer._offered
    assert set(os.listdir("/proc/self/fd")) <= before
    assert make_request(key, 1, 2, "g", threads=threads).answer() is None


@pytest.mark.parametrize("said", [b"", b"x", bytes(16), bytes(4096)])
def test_a_stranger_gets_nothing_and_holds_nobody_up(said: bytes) -> None:
    offer = make_offer(2, "g", threads=False)
    address = f"\0torchestra-{offer.key[:16].hex()}"
    silent, stranger = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with silent, stranger:
        for each in (silent, stranger):
            each.settimeout(SOON)
            each.connect(address)
        if said:
            stranger.send(said)
        else:
            stranger.shutdown(socket.SHUT_WR)
        try:
            until(answer_in_background(offer.key, False), offer).abandon()
            message, descriptors, _, _ = socket.recv_fds(stranger, 16, 1)
            assert (message, descriptors) == (b"", [])
        finally:
            offer.close()
            offer.transfer.abandon()


def test_the_store_needs_the_key_too() -> None:
    from torchestra.store import TCPStore

    offer = make_offer(2, "g", threads=False)
    try:
        with pytest.raises(DistNetworkError):
            TCPStore(f"unix:@torchestra-store-{offer.key[:16].hex()}", 0, timeout=2, secret=b"another")
    finally:
        offer.close()
        offer.transfer.abandon()
