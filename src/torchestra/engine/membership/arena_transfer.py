"""Pass on to the other survivors the arena and the store that the proposer of a new group has made.

This needs no existing store, which may have died with a rank; the survivors recognise each other by a key of
32 random bytes in the old arena (arena_registers.py), where only ranks of the group can read it. Among
processes, half of the key names an abstract Unix socket, and the other half is the token that both sides
prove to know (fd_passing.py): every process on the host can see the names of such sockets.

Nothing here waits longer than it is told to: a rank that waits calls :meth:`ArenaOffer.serve` or
:meth:`ArenaRequest.answer` repeatedly.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.memory.fd_passing import DescriptorRequest, DescriptorServer
from torchestra.errors import DistBackendError, DistNetworkError
from torchestra.store import HashStore, Store, TCPStore
from torchestra.store.base import DEFAULT_STORE_TIMEOUT

_CONNECT_SECONDS = 1.0
_CLOSE_SECONDS = 3.0


class ArenaTransfer:
    """The arena and the store of a new group, as one of its ranks holds them.

    Attributes:
        arena: the memory that its ranks share.
        store: the store that they share; the rank that made the group serves it.
        threads: where ranks are threads, the thread of each rank; the ranks fill it as they enter.
    """

    def __init__(
        self, arena: Arena, store: Store, threads: dict[int, threading.Thread] | None = None
    ) -> None:
        self.arena = arena
        self.store = store
        self.threads = threads

    def abandon(self) -> None:
        """Release both: the group was not made."""
        self.store.close()


class ArenaOffer(Protocol):
    """The proposer's side.

    Attributes:
        key: the key with which the others ask.
        transfer: the proposer's own.
    """

    key: bytes
    transfer: ArenaTransfer

    def serve(self, timeout_s: float = 0.0) -> None:
        """Answer the ranks that have asked; wait up to ``timeout_s`` for one to ask."""

    def close(self) -> None:
        """Stop answering."""


class ArenaRequest(Protocol):
    """The side of a rank that asks."""

    def answer(self) -> ArenaTransfer | None:
        """Return the transfer, or None if it has not come yet: call again then."""

    def sleep(self, seconds: float) -> None:
        """Sleep until :meth:`answer` may have come further, at most so long."""

    def close(self) -> None:
        """Stop asking."""


def make_offer(size: int, name: str, *, threads: bool) -> ArenaOffer:
    """Make the arena and store of the group ``name`` of ``size`` ranks, and be ready to give them.

    Raises:
        DistBackendError: there is no memory for it.
    """
    return _ThreadOffer(size, name) if threads else _ProcessOffer(size, name)


def make_request(key: bytes, rank: int, size: int, name: str, *, threads: bool) -> ArenaRequest:
    """Ask, as a rank of the group ``name`` of ``size`` ranks, for what another one offers under ``key``."""
    return _ThreadRequest(key) if threads else _ProcessRequest(key, rank, size, name)


def leave_store(store: Store) -> None:
    """Close the store of a group that this rank leaves; give the others a moment to finish first."""
    if isinstance(store, _ServedStore):
        store.linger()
    store.close()


def _new_key() -> bytes:
    key = secrets.token_bytes(at.PROPOSAL_KEY_BYTES)
    return bytes([key[0] & 0x7F]) + key[1:]  # not the key of an offer (admission.py)


def _halves(key: bytes) -> tuple[str, bytes]:
    """Return the public half of a key, and the half that proves that a rank belongs to the group."""
    half = len(key) // 2
    return key[:half].hex(), key[half:]


# -- ranks that are processes


class _ProcessOffer:
    """A new arena for ``size`` processes, and the server of their store."""

    def __init__(self, size: int, group: str) -> None:
        self.key = _new_key()
        name, token = _halves(self.key)
        with contextlib.ExitStack() as undo:
            arena, descriptor = Arena.create(layout_for(size), group)
            os.close(descriptor)
            self._server = undo.enter_context(
                DescriptorServer(range(size), None, group, address=f"torchestra-{name}", token=token.hex())
            )
            store: Store = HashStore() if size == 1 else _ServedStore(name, token)
            self.transfer = ArenaTransfer(arena, store)
            undo.pop_all()

    def serve(self, timeout_s: float = 0.0) -> None:
        self._server.serve(self.transfer.arena.descriptor, timeout_s)

    def close(self) -> None:
        self._server.close()


class _ServedStore(TCPStore):
    """The proposer's end of the store, and its server."""

    def __init__(self, name: str, proof: bytes) -> None:
        super().__init__(_store_of(name), 0, is_master=True, secret=proof)

    def linger(self) -> None:
        """Wait a little until the others have closed theirs."""
        if self._server is not None:
            self._server.linger(_CLOSE_SECONDS)


class _ProcessRequest:
    """One process's request for another's offer."""

    def __init__(self, key: bytes, rank: int, size: int, group: str) -> None:
        self._name, self._token = _halves(key)
        self._size = size
        invitation = f"torchestra-{self._name}:{self._token.hex()}"
        self._request = DescriptorRequest(invitation, None, rank, group)
        self._arena: Arena | None = None

    def sleep(self, seconds: float) -> None:
        self._request.sleep(seconds)

    def answer(self) -> ArenaTransfer | None:
        try:
            if self._arena is None:
                self._arena = self._fetch()
            if self._arena is None:
                return None
            store = TCPStore(_store_of(self._name), 0, timeout=_CONNECT_SECONDS, secret=self._token)
        except DistNetworkError:
            return None  # the proposer is gone, which the agreement notices, or is busy
        store.set_timeout(DEFAULT_STORE_TIMEOUT)
        return ArenaTransfer(self._arena, store)

    def close(self) -> None:
        self._request.close()

    def _fetch(self) -> Arena | None:
        try:
            descriptor = self._request.advance()
        except DistBackendError:
            return None  # once the proposer is gone, any process may take its name
        if descriptor is None:
            return None
        self.close()
        try:
            return Arena.attach(descriptor, layout_for(self._size))
        finally:
            os.close(descriptor)


def _store_of(name: str) -> str:
    return f"unix:@torchestra-store-{name}"


# -- ranks that are threads


_offered: dict[bytes, ArenaTransfer] = {}


class _ThreadOffer:
    """A new arena for threads of this process, which share the object."""

    def __init__(self, size: int, group: str) -> None:
        self.key = _new_key()
        arena, descriptor = Arena.create(layout_for(size), group)
        os.close(descriptor)
        self.transfer = ArenaTransfer(arena, HashStore(), {})
        _offered[self.key] = self.transfer

    def serve(self, timeout_s: float = 0.0) -> None:
        time.sleep(timeout_s)

    def close(self) -> None:
        _offered.pop(self.key, None)


class _ThreadRequest:
    """A thread's request for another's offer."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def answer(self) -> ArenaTransfer | None:
        return _offered.get(self._key)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        pass
