"""Replicas of a store on this host, each in a process of its own or all in this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator, Sequence

from torchestra.errors import DistNetworkError
from torchestra.store import ReplicatedStore, StoreReplica
from torchestra.store.base import pauses
from torchestra.store.replicated.addresses import Addresses
from torchestra.store.replicated.sessions import SessionPool
from torchestra.store.tcp.protocol import Request


def listeners(count: int) -> tuple[list[socket.socket], list[str]]:
    """Return sockets that listen, and their addresses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    return sockets, [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@contextlib.contextmanager
def replicas_here(count: int, secret: str | None = None) -> Iterator[tuple[list[StoreReplica], list[str]]]:
    """Replicas in this process, and their addresses."""
    sockets, addresses = listeners(count)
    served = [
        StoreReplica(index, addresses, secret=secret, listen_fd=each.detach())
        for index, each in enumerate(sockets)
    ]
    try:
        yield served, addresses
    finally:
        for replica in served:
            replica.close()


def serve(
    index: int, addresses: Sequence[str], listener: socket.socket | None, recovering: bool, generation: int
) -> None:
    """The life of a process that serves a replica."""
    fd = None if listener is None else listener.detach()
    StoreReplica(index, addresses, listen_fd=fd, recovering=recovering, generation=generation)
    multiprocessing.Event().wait()


class ReplicaProcesses:
    """Replicas in processes of their own, which can be killed and come back."""

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("fork")
        self._sockets, self.addresses = listeners(count)
        self.former: list[multiprocessing.process.BaseProcess] = []  # those that were replaced
        self.processes = [self._start(index, self._sockets[index], False) for index in range(count)]
        for each in self._sockets:
            each.close()

    def _start(
        self, index: int, listener: socket.socket | None, recovering: bool, generation: int = 0
    ) -> multiprocessing.process.BaseProcess:
        arguments = (index, listener, recovering, generation)
        process = self._context.Process(
            target=self._serve, args=arguments, name=f"replica-{index}", daemon=True
        )
        process.start()
        return process

    def _serve(self, index: int, listener: socket.socket | None, recovering: bool, generation: int) -> None:
        for each in self._sockets:
            if each is not listener:
                each.close()
        serve(index, self.addresses, listener, recovering, generation)

    def kill(self, index: int) -> None:
        """Kill a replica's process, as ``kill -9`` does."""
        self.processes[index].kill()
        self.processes[index].join()

    def restart(self, index: int) -> None:
        """Start a killed replica again, without what it held."""
        self.processes[index] = self._start(index, None, True)

    def replace(self, store: ReplicatedStore) -> int:
        """Serve a lost replica at another address, when the store says that one is; return which."""
        (listener,), (address,) = listeners(1)
        for _ in pauses(60.0):
            if (lost := store.replace_lost(address, 0.0)) is not None:
                break
        else:
            raise AssertionError("no replica is taken for lost")
        self.addresses = list(lost.addresses)
        self.former.append(self.processes[lost.index])
        self.processes[lost.index] = self._start(lost.index, listener, True, lost.generation)
        listener.close()
        return lost.index

    def close(self) -> None:
        for process in (*self.processes, *self.former):
            process.kill()
            process.join()


class StoreWithReplicas(ReplicatedStore):
    """A store that closes its replicas when it is closed."""

    def __init__(self, count: int, secret: str | None = None) -> None:
        self._stack = contextlib.ExitStack()
        _, addresses = self._stack.enter_context(replicas_here(count, secret))
        super().__init__(addresses, secret=secret)

    def clone(self) -> ReplicatedStore:
        return ReplicatedStore(self.addresses, self.timeout, secret=self.secret)

    def close(self) -> None:
        super().close()
        self._stack.close()


def takes_part(address: str) -> bool:
    """Return whether a replica takes part: it answers a client, or sends it to the primary."""
    pool = SessionPool(Addresses([address]), None, "probe")
    try:
        pool.request(Request.CHECK, [], 0.0, 0.0)
    except DistNetworkError as error:
        told = str(error)  # once one has been replaced, it tells where the others are
        return "for the primary" in told or "3 addresses, of 1 replicas" in told
    finally:
        pool.close()
    return True
