"""The actor that holds one rank: it has the rank forked, and keeps its events for the launcher to fetch.

In an elastic job the fork server stays after the rank has died, and forks its replacement.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.launcher.backend import JobListener
from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.flight_dumps import FlightDumps
from torchestra.launcher.fork_backend import ForkBackend
from torchestra.launcher.fork_server_client import ForkServerClient
from torchestra.launcher.on_ray.messages import ActorInfo, Event, EventBatch, Printed, ResultChunk, Started
from torchestra.launcher.port_reservation import PortReservation
from torchestra.launcher.root_cause import failure_from
from torchestra.launcher.spec import Ended, Failure, JobSpec, PhaseReached, Script, StoreServed
from torchestra.store import ReplicatedStore, TCPStoreServer
from torchestra.store.replicated import ReplicaListener, Standby
from torchestra.store.tcp.address import Address, listen

CONCURRENT_CALLS = 5
"""One call listens, one listens again after a broken connection, one signals, one closes, one connects to the
job's store."""
_LISTEN_SECONDS = 10.0
_BATCH_BYTES = 8 << 20
_KEPT_BYTES = 16 << 20


class RankActor:
    """Holds one rank of a job, and serves the job's store or a replica of it if it is told to.

    The launcher calls its methods.
    """

    def __init__(self) -> None:
        self._store: TCPStoreServer | None = None
        self._listener: ReplicaListener | None = None
        self._standby: Standby | None = None
        self._server: ForkServerClient | None = None  # of a rank that is not there yet
        self._master: PortReservation | None = None
        self._held: _HeldRank | None = None

    def info(self) -> ActorInfo:
        """Return this actor's node and resources."""
        import ray

        import torchestra

        context = ray.get_runtime_context()
        return ActorInfo(
            node=context.get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            cluster=context.gcs_address,
            version=torchestra.__version__,
        )

    def reserve_master_port(self) -> int:
        """Return a MASTER_PORT."""
        self._master = PortReservation("")
        return self._master.master_port

    def serve_store(self, host: str, secret: str) -> str:
        """Serve the job's store, which survives any rank's death; return its address."""
        listener = listen(Address(host, 0), secured=True)
        address = Address(host, listener.getsockname()[1])
        self._store = TCPStoreServer(listen_fd=listener.detach(), secret=secret)
        return str(address)

    def reserve_replica(self, host: str, silent_s: float, secret: str) -> str:
        """Return where this actor is going to serve a replica of the job's store, now or later.

        Args:
            silent_s: for how long a replica must have been silent to be replaced.
        """
        self._listener = ReplicaListener(host, silent_s, secret)
        return self._listener.address

    def stand_by(self, addresses: Sequence[str], secret: str) -> None:
        """Serve a replica if this actor's address is among theirs; else replace one that is lost."""
        assert self._listener is not None
        if self._listener.address in addresses:
            self._listener.serve(addresses)
        self._standby = Standby(self._listener, ReplicatedStore(addresses, secret=secret))

    def come_later(self, host: str, silent_s: float, addresses: Sequence[str], secret: str) -> None:
        """Do both in a job that runs, unless that has been done."""
        if self._listener is None:
            self.reserve_replica(host, silent_s, secret)
            self.stand_by(addresses, secret)

    def _store_variables(self) -> dict[str, str]:
        return {} if self._standby is None else {"TORCHESTRA_STORE": ",".join(self._standby.store.addresses)}

    def warm_up(self, variables: Mapping[str, str]) -> None:
        """Begin to load what a rank needs, before it is known which one this actor will hold.

        Args:
            variables: as for :meth:`start`.
        """
        self._server = ForkServerClient.spawned({**os.environ, **variables})

    def start(self, spec: JobSpec, rank: int, local_rank: int, variables: Mapping[str, str]) -> None:
        """Begin to start the rank.

        Args:
            spec: the spec of the whole job. The search path is this process's; so is the working directory if
                the job's is empty.
            local_rank: its number among the ranks on this node.
            variables: variables of the rank's environment, which override this process's.

        Raises:
            InvalidArgumentError: the job's directory or its script is not on this host.
        """
        own = replace(
            spec,
            nproc=1,
            environment={**os.environ, **variables},
            directory=spec.directory or os.getcwd(),
            search_path=_search_path(),
            first_rank=rank,
            first_local_rank=local_rank,
            world_size=spec.nproc,
        )
        _check_files(own)
        server = self._server or ForkServerClient.spawned(own.environment)
        self._server = None
        self._held = _HeldRank(own, server, self._store_variables)

    def replace(self) -> None:
        """Begin to start the rank again, whose process has ended; it is to join the others.

        Raises:
            DistBackendError: its fork server has ended.
        """
        assert self._held is not None
        self._held.replace()

    def listen(self, seen: int) -> EventBatch:
        """Wait a while for events; forget the first ``seen``, and return later ones."""
        assert self._held is not None
        batch = self._held.listen(seen)
        return batch if self._standby is None else replace(batch, replicas=self._standby.store.addresses)

    def signal(self, signum: int, final: bool) -> None:
        if self._held is not None:
            self._held.signal(signal.Signals(signum), final)

    def end_rank(self) -> None:
        """End the rank if it still runs; it is gone when this returns."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def close(self) -> None:
        """End the rank if it still runs, and all that is served here; it is gone when this returns."""
        self.end_rank()
        if self._server is not None:
            self._server.close()
        if self._standby is not None:
            self._standby.close()
        elif self._listener is not None:
            self._listener.close()
        if self._store is not None:
            self._store.close()
        if self._master is not None:
            self._master.close()


def _search_path() -> tuple[str, ...]:
    """Return the search path of this process, without the entries that Ray added for itself."""
    import ray

    rays_own = os.path.dirname(ray.__file__)
    return tuple(path for path in sys.path if not path.startswith(rays_own))


def _check_files(spec: JobSpec) -> None:
    directory = spec.directory
    where = (
        f"on host {socket.gethostname()}; it must be there on every node, or be shipped: see --working-dir"
    )
    if not os.path.isdir(directory):
        raise InvalidArgumentError(f"there is no directory {directory!r} {where}")
    if isinstance(spec.target, Script) and not spec.target.is_module:
        script = os.path.join(directory, spec.target.name)
        if not os.path.exists(script):
            raise InvalidArgumentError(f"there is no file {script!r} {where}")


class _HeldRank(JobListener):
    """A rank, its fork server, and a thread that runs the event loop for both."""

    def __init__(
        self, spec: JobSpec, server: ForkServerClient, changed: Callable[[], Mapping[str, str]]
    ) -> None:
        self.spec = spec
        self.loop = EventLoop()
        self._events: deque[Event] = deque()
        self._first = 0  # the index of the first of these
        self._size = 0  # bytes in them
        self._changed = threading.Condition()
        self._begun = False
        self._over = False
        self._dumps = FlightDumps(spec.environment.get("TORCHESTRA_RECORD"))
        self._pids: list[int] = []
        self._server = server
        self._backend = ForkBackend(self._server, PortReservation(), changed=changed)
        self._thread = threading.Thread(target=self._run, name="torchestra-rank", daemon=True)
        self._thread.start()

    def listen(self, seen: int) -> EventBatch:
        """See :meth:`RankActor.listen`."""
        with self._changed:
            while self._first < seen:
                self._size -= _size(self._events.popleft())
                self._first += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events or self._over, _LISTEN_SECONDS)
            batch: list[Event] = []
            size = 0
            for event in self._events:
                if batch and size + _size(event) > _BATCH_BYTES:
                    break
                batch.append(event)
                size += _size(event)
            return EventBatch(self._first, tuple(batch), time.monotonic())

    def replace(self) -> None:
        """See :meth:`RankActor.replace`."""
        if not self._thread.is_alive():
            raise DistBackendError(
                f"the process that forks rank {self.spec.first_rank} on host {socket.gethostname()} has ended"
            )
        self._pids.clear()
        self.loop.call_soon_threadsafe(partial(self._backend.replace, 0))

    def signal(self, signum: signal.Signals, final: bool) -> None:
        """See :meth:`RankActor.signal`."""
        if self._over:
            return
        if not self._begun:
            if final:
                self._add(Ended(0, -signum, time.monotonic()))
                self._leave()
            return
        if final:
            self._dumps.hold(self._pids)
        with contextlib.suppress(OSError):
            self._backend.signal(signum, final)

    def close(self) -> None:
        """End the server, and with it the rank and this thread."""
        self._leave()
        self._thread.join()
        self._server.close()
        self._dumps.write()
        self.loop.close()

    def _leave(self) -> None:
        """Make the thread end, and calls of :meth:`listen` return."""
        self._over = True
        with self._changed:
            self._changed.notify_all()
        self.loop.call_soon_threadsafe(lambda: None)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._backend):
                self._backend.start(self)
                while not self._over:
                    self.loop.run_once()
                    self._await_room()
        except BaseException as error:
            if not self._over:
                self._add(failure_from(error))
                self._add(Ended(0, -signal.SIGKILL, time.monotonic()))

    def _await_room(self) -> None:
        """Pause reading from a rank that prints faster than the launcher fetches its output."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._size < _KEPT_BYTES)

    def _add(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._size += _size(event)
            self._changed.notify_all()

    # Events from the backend: see JobListener

    def begun(self) -> None:
        self._begun = True

    def forked(self, rank: int, pid: int, host: str = "") -> None:
        self._pids.append(pid)
        self._add(Started(pid))

    def store_served(self, served: StoreServed) -> None:
        return  # the ranks meet elsewhere

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        self._add(Printed(stream, data))

    def reached(self, rank: int, reached: PhaseReached) -> None:
        self._add(reached)

    def failed(self, rank: int, failure: Failure) -> None:
        self._add(failure)

    def returned(self, rank: int, result: BinaryIO) -> None:
        with result:
            result.seek(0)
            while data := result.read(_BATCH_BYTES):
                self._add(ResultChunk(data, last=False))
        self._add(ResultChunk(b"", last=True))

    def ended(self, end: Ended) -> None:
        self._backend.drain()
        self._add(end)

    def lost(self) -> None:
        pass


def _size(event: Event) -> int:
    return len(event.data) if isinstance(event, (Printed, ResultChunk)) else 0
