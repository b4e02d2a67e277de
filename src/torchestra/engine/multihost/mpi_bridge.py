"""The bridge over MPI, through mpi4py: the default under mpiexec.

Each bridge has a communicator of its own, made among only its ends, so that it interferes neither with other
bridges nor with the program's own use of MPI, and no other rank takes part. Operations are MPI's non-blocking
ones on bytes; a waiting caller polls one. MPI moves bytes only while some call into it runs, so polls are
close together at first, as for a small message, and then so far apart that the buffers of a fast network do
not run empty.

The ends find each other through the rail's store: each tells its rank in MPI's world. The call that makes a
communicator waits for the other ends. So a thread of its own makes it, when all are known to come, and
operations that are begun before are queued. Operations under way when a bridge is closed cannot be cancelled;
they are kept, with their tensors, until the process ends.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchestra.engine.multihost.bridge import Bridge, BridgeError, PeerTensors, Pending
from torchestra.engine.multihost.mpi import limit_finalize, start_mpi
from torchestra.errors import DistError, StoreTimeoutError
from torchestra.store import Store
from torchestra.store.unreadable import reading

_AT_ONCE = 100
"""How often a wait polls before it sleeps in between."""

_IN_A_ROW = 4
"""How often it polls then each time. A poll moves some tens of kilobytes at most."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 200e-6
_POLL_SECONDS = 0.5

_TAG = 0

_PIECE_BYTES = 1 << 30
"""Before MPI 4 a message has less than 2 GiB."""

Begin = Callable[[Any], Sequence[Any]]
"""Given a communicator, begins some of MPI's requests."""


class _End(NamedTuple):
    """What an end tells the others: its rank in MPI's world, the size of that, and a tag of its choice."""

    rank: int
    size: int
    tag: int


def read_ends(texts: Sequence[bytes]) -> list[_End]:
    """Return what the ends have told.

    Raises:
        DistStoreError: it is something else.
    """
    with reading("what another host has told of its MPI, in the store"):
        ends = [_End(*json.loads(text)) for text in texts]
        if any(type(number) is not int for end in ends for number in end):
            raise ValueError(f"no numbers: {ends!r:.100}")
        return ends


class _Work:
    """See Pending. Keeps the tensors alive until it has ended, or is dropped."""

    def __init__(self, bridge: MPIBridge, begin: Begin, *tensors: torch.Tensor) -> None:
        self._bridge = bridge
        self._begin: Begin | None = begin
        self._tensors = tensors
        self._requests: Sequence[Any] | None = None
        self._testing = threading.Lock()
        self.ended = False

    def begin(self, communicator: Any) -> None:
        """Start it with MPI; called once."""
        assert self._begin is not None
        self._requests = self._begin(communicator)
        self._begin = None

    def wait(self, timeout_s: float) -> bool:
        started = time.monotonic()
        polls, pause = 0, _SHORTEST_PAUSE
        while not self.has_ended(1 if polls < _AT_ONCE else _IN_A_ROW):
            waited = time.monotonic() - started
            if waited >= timeout_s:
                return False
            polls += 1
            if self._requests is None:
                self._bridge.opened.wait(min(timeout_s - waited, _POLL_SECONDS))
            elif polls < _AT_ONCE:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(1.2 * pause, _LONGEST_PAUSE)
        return True

    def awaited(self) -> Sequence[int]:
        return ()

    def has_ended(self, times: int = 1) -> bool:
        """Return whether it has ended; let MPI make progress on it ``times`` times.

        Raises:
            BridgeError: it cannot end any more.
        """
        with self._testing:
            if not self.ended and self._requests is None:
                self._bridge.refuse_if_over()
            elif not self.ended and self._bridge.test(self._requests, times):
                self.ended = True
                self._requests, self._tensors = (), ()
            return self.ended

    def is_over(self) -> bool:
        """Return whether MPI does not use the tensors any more, as far as it says."""
        try:
            return self.has_ended()
        except BridgeError:
            return False


class MPIBridge(Bridge):
    """See Bridge.

    Args:
        store: one that only the ends of this rail, and only for this purpose, use.
        host, size: which end this is, and how many there are.
        timeout_s: how long to look for the others.

    Attributes:
        opened: set when the ends have met, or when that has failed.
    """

    kind = "mpi"

    def __init__(self, store: Store, host: int, size: int, timeout_s: float) -> None:
        super().__init__(host, size)
        self.opened = threading.Event()
        self._mpi = start_mpi(timeout_s)
        self._lock = threading.RLock()
        self._communicator: Any = None
        self._error = ""
        self._closed = False
        self._works: list[_Work] = []
        opening = partial(self._open, store.clone(), timeout_s)
        threading.Thread(target=opening, name="torchestra-mpi-opening", daemon=True).start()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float) -> Pending:
        if tensor.numel() > _PIECE_BYTES:
            return super().all_gather(output, tensor, timeout_s)

        def begin(communicator: Any) -> list[Any]:
            source, target, mpi_type = self._buffer(tensor), self._buffer(output), self._mpi.BYTE
            return [communicator.Iallgather([source, mpi_type], [target, mpi_type])]

        return self._begun(begin, output, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> _Work:
        def begin(communicator: Any) -> list[Any]:
            return [
                communicator.Ibcast([self._buffer(piece), self._mpi.BYTE], root)
                for piece in tensor.split(_PIECE_BYTES)
            ]

        return self._begun(begin, tensor)

    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> _Work:
        def begin(communicator: Any) -> list[Any]:
            come = [self._pieces(communicator.Irecv, tensor, end) for end, tensor in receives]
            go = [self._pieces(communicator.Isend, tensor, end) for end, tensor in sends]
            return [request for requests in (*come, *go) for request in requests]

        return self._begun(begin, *(tensor for _, tensor in (*receives, *sends)))

    def _pieces(self, begin: Callable[..., Any], tensor: torch.Tensor, end: int) -> list[Any]:
        buffers = map(self._buffer, tensor.split(_PIECE_BYTES))
        return [begin([buffer, self._mpi.BYTE], end, _TAG) for buffer in buffers]

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._error = self._error or "this end was closed"
        with self._lock:
            works, self._works = self._works, []
            communicator, self._communicator = self._communicator, None
        self.opened.set()
        if communicator is not None:
            self._give_back(communicator, works)

    @staticmethod
    def _give_back(communicator: Any, works: list[_Work]) -> None:
        under_way = [work for work in works if not work.is_over()]
        if not under_way:
            communicator.Free()
            return
        _buried.extend(under_way)
        limit_finalize()

    # -- operations

    def _buffer(self, tensor: torch.Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel())

    def _begun(self, begin: Begin, *tensors: torch.Tensor) -> _Work:
        work = _Work(self, begin, *tensors)
        with self._lock:
            self.refuse_if_over()
            self._works = [each for each in self._works if not each.ended]
            self._works.append(work)
            if self._communicator is not None:
                self._hand_over(work)
        return work

    def _hand_over(self, work: _Work) -> None:
        try:
            work.begin(self._communicator)
        except self._mpi.Exception as error:
            raise self._failed(f"MPI: {error}") from error

    def test(self, requests: Sequence[Any] | None, times: int) -> bool:
        """Return whether requests have ended; let MPI make progress on them ``times`` times."""
        try:
            return any(self._mpi.Request.Testall(requests) for _ in range(times))
        except self._mpi.Exception as error:
            raise self._failed(f"MPI: {error}") from error

    def refuse_if_over(self) -> None:
        """Raise if nothing can be begun any more."""
        if self._error:
            raise BridgeError(self._error)

    def _failed(self, error: str) -> BridgeError:
        with self._lock:
            self._error = self._error or error
        self.opened.set()
        return BridgeError(error)

    # -- opening

    def _open(self, store: Store, timeout_s: float) -> None:
        try:
            communicator = self._connected(self._meet(store, timeout_s))
        except (DistError, OSError, self._mpi.Exception) as error:
            self._failed(f"MPI: {error}")
            return
        with self._lock:
            if self._closed:
                communicator.Free()
                return
            self._communicator = communicator
            for work in self._works:
                try:
                    self._hand_over(work)
                except BridgeError:
                    break
        self.opened.set()

    def _meet(self, store: Store, timeout_s: float) -> list[_End]:
        """Exchange identities with the other ends."""
        world = self._mpi.COMM_WORLD
        tag = secrets.randbelow(world.Get_attr(self._mpi.TAG_UB))
        store.set(f"end/{self.host}", json.dumps([world.rank, world.size, tag]))
        keys = [f"end/{host}" for host in range(self.size)]
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                store.wait(keys, _POLL_SECONDS)
                return read_ends(store.multi_get(keys))
            except StoreTimeoutError:
                if self._closed:
                    raise BridgeError("this end was closed") from None
                if time.monotonic() > deadline:
                    raise BridgeError(f"not all hosts came within {timeout_s:.1f} s") from None

    def _connected(self, ends: Sequence[_End]) -> Any:
        """Return the communicator of the ends."""
        world = self._mpi.COMM_WORLD
        ranks = [end.rank for end in ends]
        if len(set(ranks)) < len(ranks) or {end.size for end in ends} != {world.size}:
            raise BridgeError(
                f"its world has {[end.size for end in ends]} ranks, by host, and these are ranks {ranks} of"
                " it: all must have been started by one mpiexec, that of the MPI which mpi4py uses"
            )
        group = world.Get_group()
        members = group.Incl(ranks)
        try:
            return world.Create_group(members, ends[0].tag)
        finally:
            members.Free()
            group.Free()


# Operations under way when their bridge was closed: MPI may still write into their memory.
_buried: list[_Work] = []
