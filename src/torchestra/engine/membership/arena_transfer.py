"""How the survivors of a group come by what the proposer of a new one has made: its arena and its store.

No store is needed for it, which may have died with a rank; the survivors know each other by a key of 32
random bytes that stands in the old arena (agreement.py), where only ranks of the group can read it. Among
processes, half of the key names an abstract Unix socket, and the other half is what a rank must say to be
given the arena's descriptor: the names of such sockets can be seen by everybody on the host. The socket
belongs to one user, is gone with the proposer's process, and leaves nothing in the file system. Strangers
that connect are held at a bounded cost (listening.py), so they hold up nobody.

Nothing here waits long: :meth:`Offer.serve` and :meth:`Request.answer` are called again and again by whoever
waits.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.memory.bounded_listener import BoundedListener
from torchestra.errors import DistNetworkError
from torchestra.store import HashStore, Store, TCPStore
from torchestra.store.base import DEFAULT_STORE_TIMEOUT
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.store.tcp.locality import peer_user

__all__ = ["ArenaTransfer", "Offer", "Request", "leave_store", "make_offer", "make_request"]

_CONNECT_SECONDS = 1.0
_FAREWELL_SECONDS = 3.0
_PROOF_SECONDS = 10.0
_YES = b"y"

_log = logging.getLogger(__name__)


class ArenaTransfer:
    """What a new group starts with, as one of its ranks holds it.

    Attributes:
        arena: the memory that its ranks share.
        store: the store that they share; whoever made the group serves it.
        threads: where ranks are threads: by rank, the thread that it is; filled by the ranks as they enter.
    """

    def __init__(
        self, arena: Arena, store: Store, threads: dict[int, threading.Thread] | None = None
    ) -> None:
        self.arena = arena
        self.store = store
        self.threads = threads

    def abandon(self) -> None:
        """Give it up: the group has not come about."""
        self.store.close()


class Offer(Protocol):
    """The proposer's side.

    Attributes:
        key: what the others ask with.
        estate: the proposer's own.
    """

    key: bytes
    estate: ArenaTransfer

    def serve(self) -> None:
        """Give to those who have asked."""

    def close(self) -> None:
        """Give to nobody any more."""


class Request(Protocol):
    """Another rank's side: of the rank that asks."""

    def answer(self) -> ArenaTransfer | None:
        """What was asked for, if it has come; None to be called again."""

    def close(self) -> None:
        """Ask no more."""


def make_offer(size: int, name: str, *, threads: bool) -> Offer:
    """Make what the group ``name`` of ``size`` ranks starts with, and be ready to give it.

    Raises:
        DistBackendError: there is no memory for it.
    """
    return _ThreadOffer(size, name) if threads else _ProcessOffer(size, name)


def make_request(key: bytes, size: int, *, threads: bool) -> Request:
    """Ask for what another rank offers under ``key`` to a group of ``size`` ranks."""
    return _ThreadRequest(key) if threads else _ProcessRequest(key, size)


def leave_store(store: Store) -> None:
    """Close the store of a group that this rank leaves; let the others do first what they still have to."""
    if isinstance(store, _ServedStore):
        store.see_off()
    store.close()


def _new_key() -> bytes:
    return secrets.token_bytes(at.PROPOSAL_KEY_BYTES)


def _halves(key: bytes) -> tuple[str, bytes]:
    """What may be seen by everybody, and what proves that a rank belongs to the group."""
    half = len(key) // 2
    return key[:half].hex(), key[half:]


# -- ranks that are processes


class _ProcessOffer:
    """A new arena for ``size`` processes, and the server of their store."""

    def __init__(self, size: int, group: str) -> None:
        self.key = _new_key()
        name, self._proof = _halves(self.key)
        with contextlib.ExitStack() as undo:
            arena, descriptor = Arena.create(layout_for(size), group)
            os.close(descriptor)
            self._listener = undo.enter_context(
                contextlib.closing(
                    BoundedListener(
                        f"torchestra-{name}",
                        f"group {group!r}",
                        _PROOF_SECONDS,
                        lambda: size,
                        RateLimitedWarnings(_log),
                    )
                )
            )
            store: Store = HashStore() if size == 1 else _ServedStore(name, self._proof)
            self.estate = ArenaTransfer(arena, store)
            undo.pop_all()

    def serve(self) -> None:
        for connection in self._listener.ready(0):
            try:
                said = connection.recv(len(self._proof) + 1)
                if hmac.compare_digest(said, self._proof):
                    socket.send_fds(connection, [_YES], [self.estate.arena.descriptor])
            except BlockingIOError:
                continue
            except OSError:
                pass  # it is gone, or asks for nothing of ours
            self._listener.drop(connection)

    def close(self) -> None:
        self._listener.close()


class _ServedStore(TCPStore):
    """The proposer's end of the store, and its server."""

    def __init__(self, name: str, proof: bytes) -> None:
        super().__init__(_store_of(name), 0, is_master=True, secret=proof)

    def see_off(self) -> None:
        """Wait a little until the others have closed theirs."""
        if self._server is not None:
            self._server.linger(_FAREWELL_SECONDS)


class _ProcessRequest:
    """One process's way to another's offer."""

    def __init__(self, key: bytes, size: int) -> None:
        self._name, self._proof = _halves(key)
        self._size = size
        self._connection: socket.socket | None = None
        self._arena: Arena | None = None

    def answer(self) -> ArenaTransfer | None:
        if self._arena is None:
            self._arena = self._fetch()
        if self._arena is None:
            return None
        try:
            store = TCPStore(_store_of(self._name), 0, timeout=_CONNECT_SECONDS, secret=self._proof)
        except DistNetworkError:
            return None  # the proposer is gone, which is seen elsewhere, or has much to do
        store.set_timeout(DEFAULT_STORE_TIMEOUT)
        return ArenaTransfer(self._arena, store)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fetch(self) -> Arena | None:
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connection.setblocking(False)
                self._connection.connect(f"\0torchestra-{self._name}")
                if peer_user(self._connection) != os.geteuid():
                    raise PermissionError("once the proposer is gone, its name may be anybody's")
                self._connection.send(self._proof)
            _, descriptors, _, _ = socket.recv_fds(self._connection, len(_YES), 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            self.close()
            return None
        self.close()
        if not descriptors:
            return None
        try:
            return Arena.attach(descriptors[0], layout_for(self._size))
        finally:
            os.close(descriptors[0])


def _store_of(name: str) -> str:
    return f"unix:@torchestra-store-{name}"


# -- ranks that are threads


_offered: dict[bytes, ArenaTransfer] = {}


class _ThreadOffer:
    """A new arena for threads of this process, which are simply shown it."""

    def __init__(self, size: int, group: str) -> None:
        self.key = _new_key()
        arena, descriptor = Arena.create(layout_for(size), group)
        os.close(descriptor)
        self.estate = ArenaTransfer(arena, HashStore(), {})
        _offered[self.key] = self.estate

    def serve(self) -> None:
        pass

    def close(self) -> None:
        _offered.pop(self.key, None)


class _ThreadRequest:
    """Where a thread looks for it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def answer(self) -> ArenaTransfer | None:
        return _offered.get(self._key)

    def close(self) -> None:
        pass
