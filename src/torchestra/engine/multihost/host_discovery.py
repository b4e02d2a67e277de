"""The discovery of ranks that share a host, by attaching.

The first rank to come under a host id makes the host's *segment* of shared memory and says so in the store;
ranks that come later under the same id try to get into it. A rank gets a segment's memory as it does an
arena's (fd_passing.py): so a rank that has it shares memory with the rank that opened it, and one that cannot
get it, although its host has the same id, is on another host and tries the next segment of that id. When all
ranks are in some segment, the ranks that opened them write who is in theirs; the first of them joins these
lists, and each writes the outcome into its segment's memory, where the ranks of its host read it.

A rank makes two requests to the store, one that has opened a segment makes five more, and one for each rank
that gets in: O(ranks) in all. The only answers that are not short are the host's lists, which one rank reads,
and the outcome, which one rank per host reads, and which is packed (a few bytes per host). No rank polls the
store: one that waits within a host learns from the end of its connection to the segment that the outcome is
there. A rank in a segment holds a lock on it until it has entered the group (:class:`LocalRanks`)::

    finding/here/R          rank R has come; among threads, which host it says it is on
    finding/segment/ID/N    "R:host:invitation", the N-th segment of that id, and the rank that opened it
    finding/hosts           how many segments there are; each is numbered by it
    finding/arrived         how many ranks are in a segment
    finding/all             "yes", by the rank that completes the number; or why that will never be
    finding/members/H       the ranks in segment H, and the host's name
    finding/outcome         which ranks are on which host
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torchestra.engine.hosts import Hosts
from torchestra.engine.memory.fd_passing import DescriptorServer, await_end, request_descriptor
from torchestra.engine.memory.mapping import MemoryFile
from torchestra.engine.multihost.host_id import HOST_VARIABLE, host_id, host_name
from torchestra.engine.multihost.peer_values import ranks_in, read_text
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    RankFailedError,
    StoreTimeoutError,
    named,
)
from torchestra.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from torchestra.store.missing_keys import missing_indices
from torchestra.store.torch_agent import TorchStore
from torchestra.store.unreadable import reading
from torchestra.system.deadline import Deadline
from torchestra.system.limits import check_free_descriptors, naming_limits, start_thread
from torchestra.system.memory_files import make_memory_file, no_room

_SERVING_SECONDS = 1.0
_GRACE_SECONDS = 3.0
_TELL_SECONDS = 1.0
_ALL = b"yes"
_DONE, _LATE, _FAILED = b"!", b"?", b"x"
# A segment's memory: how it ended; by rank, the mark of one that has locked that byte; what there is to say.
_STATE_AT, _MARKS_AT, _MARKED = 0, 1, b"+"
_DESCRIPTORS = 8  # what a rank needs briefly, with some to spare


def may_span_hosts(store: Store, size: int) -> bool:
    """Return whether ranks that share a store may be on several hosts; the same on all of them.

    Stores in this process, in a file, or reached through a Unix socket are shared within one host only,
    unless ranks pretend to be on other hosts.
    """
    if size == 1:
        return False
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if HOST_VARIABLE in os.environ or ((here := current_thread_rank()) is not None and here.host):
        return True
    if isinstance(store, (FileStore, HashStore)) or (isinstance(store, TorchStore) and store.within_host):
        return False
    return not (isinstance(store, TCPStore) and store.host.startswith("unix:"))


def find_hosts(store: Store, rank: int, size: int, name: str, timeout_s: float) -> Hosts:
    """Find out which ranks share a host. Must be called by every rank.

    Args:
        store: a store that only these ranks, and only for this purpose, use.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
    """
    with hosts_found(store, rank, size, name, timeout_s) as (hosts, _):
        return hosts


@contextlib.contextmanager
def hosts_found(
    store: Store, rank: int, size: int, name: str, timeout_s: float, *, threads: bool = False
) -> Iterator[tuple[Hosts, LocalRanks | None]]:
    """Do as :func:`find_hosts`, and let the ranks of a host see which of them die inside the block.

    Yields the hosts, and the ranks of this one: None if these are threads.

    Args:
        threads: the ranks are threads of one process, whose host ids are trusted.
    """
    discovery = _Discovery(PrefixStore("finding", store), rank, size, name, timeout_s)
    try:
        with naming_limits(f"rank {rank} cannot enter group {name!r}"):
            hosts = _find(discovery, threads=threads)
    except BaseException as error:
        discovery.tell_failure(error)
        raise
    memory, discovery.memory = discovery.memory, None
    yield hosts, None if memory is None else LocalRanks(memory, hosts.on(hosts.host_at(rank)), rank)


def refuse_hosts(store: Store, why: str) -> Hosts | None:
    """Have ranks that look for each other over this store give up; return the hosts if all have come."""
    own = PrefixStore("finding", store)
    own.compare_set("all", "", json.dumps([[], why]))
    return Hosts.decode(own.get("outcome")) if own.check(["outcome"]) else None


def _find(discovery: _Discovery, *, threads: bool) -> Hosts:
    rank, size, name = discovery.rank, discovery.size, discovery.name
    if threads:
        return discovery.ask_everybody()
    check_free_descriptors(_DESCRIPTORS)
    discovery.store.set(f"here/{rank}", b"")
    identity = hashlib.sha256(host_id().encode()).hexdigest()[:16]
    with _HostSegment(discovery) as segment:
        for attempt in range(size):
            sign = discovery.store.compare_set(f"segment/{identity}/{attempt}", "", segment.sign)
            if sign == segment.sign.encode():
                return segment.lead()
            if (hosts := discovery.follow(sign.decode())) is not None:
                return hosts
    raise DistBackendError(f"rank {rank} of group {name!r}: no shared memory of its host admits it")


class LocalRanks:
    """The ranks of this host that enter a group: each has locked a byte of the segment, and marked it.

    Args:
        ranks: those in it, in ascending order.
        own: the rank that asks.
    """

    def __init__(self, memory: MemoryFile, ranks: Sequence[int], own: int) -> None:
        self._memory, self._ranks, self._own = memory, ranks, own

    def has_died(self, local_rank: int) -> bool:
        """Return whether a rank has ended since the hosts were found; or, if it has entered, perhaps so."""
        offset = _MARKS_AT + self._ranks[local_rank]
        is_marked = os.pread(self._memory.descriptor, 1, offset) == _MARKED
        return is_marked and offset != _MARKS_AT + self._own and not self._memory.is_held(offset)


class _Discovery:
    """One call of :func:`find_hosts`.

    Attributes:
        memory: of the segment that the rank is in.
        text_at: where in it the text begins.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str, timeout_s: float) -> None:
        self.store = store
        self.rank, self.size, self.name, self.timeout_s = rank, size, name, timeout_s
        self.deadline = Deadline(timeout_s)
        self.text_at = _MARKS_AT + size
        self.memory: MemoryFile | None = None

    def enter(self, descriptor: int) -> int:
        """Lock and mark this rank's byte in a segment's memory; return a descriptor to use from now on."""
        self.memory = memory = MemoryFile(descriptor)
        os.close(descriptor)
        offset = _MARKS_AT + self.rank
        memory.hold(offset)
        _write(memory.descriptor, _MARKED, offset)
        return memory.descriptor

    def follow(self, sign: str) -> Hosts | None:
        """Get into another rank's segment and wait there for the outcome; None if it is on another host."""
        leader, _, invitation = sign.partition(":")
        try:
            descriptor, connection = request_descriptor(
                invitation, self.store.secret, self.rank, self.name, self.deadline
            )
        except CollectiveTimeoutError:
            raise
        except DistBackendError as error:
            if isinstance(error.__cause__, OSError):
                return None
            raise
        try:
            descriptor = self.enter(descriptor)
            if not await_end(connection, Deadline(self.deadline.remaining() + _GRACE_SECONDS)):
                raise self.late()
            state = os.pread(descriptor, 1, _STATE_AT)
            text = os.pread(descriptor, os.fstat(descriptor).st_size, self.text_at)
            if state == _FAILED:
                raise self.failure(text)
            if state == _LATE:
                with reading("which ranks have not come"):
                    absent = ranks_in(json.loads(text.rstrip(b"\0")), range(self.size))
                raise self.late(absent)
            if state != _DONE:
                raise DistBackendError(
                    f"rank {self.rank} of group {self.name!r}: rank {leader}, on the same host, ended"
                    " before all ranks had joined"
                )
            with reading(f"which ranks share a host, as rank {leader} says,"):
                return Hosts.decode(text)
        finally:
            connection.close()

    def ask_everybody(self) -> Hosts:
        """Among threads, trust the hosts that they name, which rank 0 puts together."""
        self.store.set(f"here/{self.rank}", json.dumps([host_id(), host_name()]))
        if self.rank != 0:
            return self.await_outcome()
        texts = self.values([f"here/{peer}" for peer in range(self.size)])
        members: dict[str, list[int]] = {}
        names: list[str] = []
        for peer, text in enumerate(texts):
            with reading(f"the host of rank {peer}"):
                identity, called = map(read_text, json.loads(text))
            if identity not in members:
                names.append(called)
            members.setdefault(identity, []).append(peer)
        return self.tell(Hosts(list(members.values()), names))

    def tell(self, hosts: Hosts) -> Hosts:
        """Tell the others which ranks are on which host."""
        self.store.set("outcome", hosts.encode())
        return hosts

    def tell_failure(self, error: BaseException) -> None:
        """Tell the ranks that wait for all that this one will not come; never raises."""
        if isinstance(error, (CollectiveTimeoutError, GroupAbortedError)):
            return  # an error that the others know, or will find themselves
        with contextlib.suppress(DistError, OSError):
            store = self.store.clone()
            store.set_timeout(_TELL_SECONDS)  # its server may be gone
            why = f"rank {self.rank} could not enter it: {type(error).__name__}: {error}"
            store.compare_set("all", "", json.dumps([[], why]))

    def failure(self, text: bytes) -> GroupAbortedError:
        """Return the error for a text by :meth:`tell_failure`, or by a segment that has lost a rank."""
        with reading(f"why group {self.name!r} cannot be used"):
            died, why = json.loads(text)
            died = ranks_in(died, range(self.size))
        message = f"rank {self.rank}: group {self.name!r} cannot be used: {why}"
        return RankFailedError(message, died) if died else GroupAbortedError(message)

    def await_all(self) -> None:
        """Wait until all ranks are in a segment.

        Raises:
            GroupAbortedError: one of them will never be.
        """
        (answer,) = self.values(["all"])
        if answer != _ALL:
            raise self.failure(answer)

    def await_outcome(self) -> Hosts:
        """Wait for the outcome, which another rank writes, and return it."""
        text = self.values(["outcome"])[0]
        with reading(f"which ranks of group {self.name!r} share a host"):
            return Hosts.decode(text)

    def values(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that exist once the others have come."""
        left = timedelta(seconds=max(0.001, self.deadline.remaining()))
        try:
            return self.store.await_values(keys, left)
        except StoreTimeoutError as error:
            raise self.late() from error

    def late(self, absent: Sequence[int] | None = None) -> CollectiveTimeoutError:
        """Return the error that says which ranks have not come; ``absent`` if these are known."""
        missing = tuple(absent or missing_indices(self.store, [f"here/{peer}" for peer in range(self.size)]))
        who = named(missing) if missing else "a rank"
        return CollectiveTimeoutError(
            f"{who} of group {self.name!r} did not come within {self.timeout_s:.1f} s (seen from rank"
            f" {self.rank} of {self.size}): are they running, and do they use the same rendezvous?",
            missing,
        )


def _write(descriptor: int, data: bytes, offset: int) -> None:
    try:
        os.pwrite(descriptor, data, offset)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room("what the ranks of a host tell each other while they meet") from error


class _HostSegment:
    """The segment that a rank opens in case it is the first of its host."""

    def __init__(self, discovery: _Discovery) -> None:
        self._discovery = discovery
        self._closed = threading.Event()
        self._admission = DescriptorServer(
            range(discovery.size), discovery.store.secret, discovery.name, taken=[discovery.rank], keeps=True
        )
        self._descriptor = -1
        self.sign = f"{discovery.rank}:{self._admission.invitation}"
        self._server = threading.Thread(
            target=self._serve, name=f"torchestra-segment-{discovery.rank}", daemon=True
        )

    def __enter__(self) -> _HostSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._server.is_alive():
            self._admission.wake()
            self._server.join()
        self._admission.close()

    def lead(self) -> Hosts:
        """Admit ranks of this host until all ranks are in a segment, and tell them the outcome."""
        self._descriptor = self._discovery.enter(make_memory_file("torchestra-segment"))
        try:
            hosts = self._find_out()
        except CollectiveTimeoutError as error:
            self._show(_LATE, json.dumps(error.missing).encode())
            raise
        except GroupAbortedError as error:
            died = error.ranks if isinstance(error, RankFailedError) else ()
            self._show(_FAILED, json.dumps([died, str(error).partition(" cannot be used: ")[2]]).encode())
            raise
        self._show(_DONE, hosts.encode())
        return hosts

    def _show(self, state: bytes, text: bytes) -> None:
        _write(self._descriptor, text, self._discovery.text_at)
        _write(self._descriptor, state, _STATE_AT)

    def _find_out(self) -> Hosts:
        discovery, store = self._discovery, self._discovery.store
        host = store.add("hosts", 1) - 1
        self._count(1)
        start_thread(self._server)
        discovery.await_all()
        members = [discovery.rank, *self._admission.given]
        store.set(f"members/{host}", json.dumps([members, host_name()]))
        return discovery.tell(self._put_together()) if host == 0 else discovery.await_outcome()

    def _put_together(self) -> Hosts:
        discovery, store = self._discovery, self._discovery.store
        keys = [f"members/{other}" for other in range(store.add("hosts", 0))]
        texts = discovery.values(keys)
        with reading(f"which ranks of group {discovery.name!r} share a host"):
            members = [json.loads(text) for text in texts]
            parts = [ranks_in(ranks, range(discovery.size)) for ranks, _ in members]
            if sorted(rank for part in parts for rank in part) != list(range(discovery.size)):
                raise ValueError(f"a rank is missing, or there twice: {parts!r:.100}")
            return Hosts(parts, [read_text(called) for _, called in members])

    def _count(self, ranks: int) -> None:
        if self._discovery.store.add("arrived", ranks) == self._discovery.size:
            self._discovery.store.compare_set("all", "", _ALL)

    def _serve(self) -> None:
        admission = self._admission
        counted = 0
        while not self._closed.is_set():
            admission.serve(self._descriptor, _SERVING_SECONDS)
            if (lost := admission.ended()) and not self._closed.is_set():
                # A rank that is in waits for the outcome, and ends its connection after that.
                why = f"{named(lost)} died before all ranks had come"
                with contextlib.suppress(DistError, OSError):
                    self._discovery.store.compare_set("all", "", json.dumps([lost, why]))
            if came := len(admission.given) - counted:
                counted += came
                self._count(came)
