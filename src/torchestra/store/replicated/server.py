"""A replica of a store, served to clients and to the other replicas.

As in a TCPStore's server, one thread does everything: clients' requests, the other replicas' messages, and
the protocol's clock (replica.py is the protocol, contents.py the state machine). Only connecting to another
replica, which may block, has a thread of its own for each of them.

A client's request is *proposed*: it takes a place in the log, and is answered when the entry is executed.
That is so for reads as well, hence they are linearizable: when a read's entry is executed, it has been
committed after the client asked. A read whose keys are missing then waits in this replica's table for an
entry that follows its own. A replica that loses its place as the primary, or its majority, sends all clients
elsewhere; a client repeats there what it asked, and what has been executed is not executed again
(contents.py).

Two replicas have two connections, one from each side, on which only the side that made it sends. The kernel
closes them with a process, so a death is noticed at once.

A lost replica is *replaced* by one at another address, which recovers as one that was restarted would
(replica.py tells why that is right even if the old one lives). A client asks for that: it names the address
where it is going to serve, and how long a replica must have been silent. The primary chooses which, and the
log carries its index, its *generation* (how often it has been replaced, counting this time) and the address.
Of several that ask at once the first in the log gets it, for the generation must be the next one. As the
entry must be committed, a majority without the lost one lived a moment ago. The generation is the upper part
of the new one's incarnation, so that this is greater than all earlier ones, whatever the hosts' clocks say.

Each replica connects to the new address when it executes the entry. A client learns of it with its next
request: the first one on a connection after a change is answered by a REDIRECT that has all addresses. One
that has nothing to ask asks for that alone now and then (refreshing.py).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from torchestra.errors import DistNetworkError, InvalidArgumentError
from torchestra.store.base import check_integer
from torchestra.store.replicated.addresses import parse_address, parse_addresses
from torchestra.store.replicated.contents import READS, UNNUMBERED, Contents, replacement_fields
from torchestra.store.replicated.messages import (
    KINDS,
    MAX_REQUEST,
    REFRESH,
    REPLACE,
    SESSION_BYTES,
    SUBMIT,
    Entry,
    Message,
)
from torchestra.store.replicated.replica import HEARTBEAT_S, VIEW_CHANGE_TIMEOUT_S, Messages, Replica
from torchestra.store.secret import Secret
from torchestra.store.table import PendingWait
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.connection import Connection
from torchestra.store.tcp.peer import Peer, Stage
from torchestra.store.tcp.protocol import Outcome, ProtocolError, Reply, Request, encode, number
from torchestra.store.tcp.requests import Waiting
from torchestra.store.tcp.server import TCPStoreServer
from torchestra.system.deadline import RunningClock
from torchestra.system.limits import start_thread

_TICK_S = HEARTBEAT_S / 2
_DIAL_SECONDS = 2.0
_BETWEEN_DIALS_S = 0.1
_MAX_UNSENT = 10_000
_PARKED_SECONDS = 3600.0
_CODES = frozenset(Request) | {REPLACE}
_GENERATION_BITS = 48
_CLOCK_BITS = 14  # of the time in ns, those that are left out: 16 µs, and there is room until the year 2116

_log = logging.getLogger(__name__)


class _Proposal:
    """A client's request on its way through the log."""

    __slots__ = ("code", "entry", "fields", "outcome", "peer")

    def __init__(self, peer: Peer, entry: Entry, code: int, fields: Sequence[bytes]) -> None:
        self.peer, self.entry, self.code, self.fields = peer, entry, code, fields
        self.outcome: Outcome | Waiting | None = None


class StoreReplica(TCPStoreServer):
    """Serves one of the replicas of a :class:`~torchestra.ReplicatedStore` until :meth:`close`.

    It runs in a daemon thread, and ends with its process at the latest. The store goes on as long as a
    majority of the replicas lives: two of three, three of five, both of two.

    Args:
        index: which replica this is, from 0 on.
        addresses: where all replicas listen, by index, each as ``host:port``; the same for all.
        secret: as for :class:`~torchestra.store.TCPStoreServer`; the same for all.
        listen_fd: the descriptor of a bound socket to listen on, which it takes over; by default it
            listens at its own address.
        recovering: this replica was served before, by a process that has ended, perhaps with the same
            address. It takes part again when it has the state from the others, of which a majority must live.
        generation: how often this replica has been replaced by one at another address, as
            :meth:`ReplicatedStore.replace_lost` has told.

    Raises:
        DistNetworkError, InvalidArgumentError: as for :class:`~torchestra.store.TCPStoreServer`.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        *,
        secret: Secret = None,
        listen_fd: int | None = None,
        recovering: bool = False,
        generation: int = 0,
    ) -> None:
        self._replicas = parse_addresses(addresses)
        index = check_integer("index", index)
        if not 0 <= index < len(self._replicas):
            raise InvalidArgumentError(
                f"StoreReplica: `index` must be from 0 to {len(self._replicas) - 1}, got {index}"
            )
        generation = check_integer("generation", generation)
        if not 0 <= generation < 1 << 63 - _GENERATION_BITS or (generation and not recovering):
            raise InvalidArgumentError(
                "StoreReplica: `generation` must be what replace_lost has told, and 0 unless `recovering`,"
                f" got {generation}"
            )
        self._index, self._recovering, self._generation = index, recovering, generation
        self._clock = RunningClock()
        self._links: dict[int, Peer] = {}
        self._indices: dict[Peer, int] = {}  # of the other replicas, by the connections they have made
        self._dialed: deque[tuple[int, Address, socket.socket]] = deque()
        self._version = 0  # of the addresses: how many replicas have been replaced
        self._told: dict[Peer, int] = {}  # by client, of which version the addresses are that it was told
        self._lost = {other: threading.Event() for other in range(len(self._replicas)) if other != index}
        self._proposals: dict[int, _Proposal] = {}
        self._served = False
        self._own = own = self._replicas[index]
        super().__init__(own.host, own.port, secret=secret, listen_fd=listen_fd)
        for other, lost in self._lost.items():
            lost.set()
            name = f"{self!r} to {other}"
            start_thread(threading.Thread(target=self._dial, args=(other,), name=name, daemon=True))

    def close(self) -> None:
        """See :meth:`TCPStoreServer.close`."""
        super().close()
        for lost in self._lost.values():
            lost.set()  # so that the threads that connect see it

    def __repr__(self) -> str:
        return f"StoreReplica({self._index} of {len(self._replicas)} at {self._own})"

    def _serve(self) -> None:
        self._contents = Contents(self._table)
        self._replica = Replica(
            self._index,
            len(self._replicas),
            self,
            (self._generation << _GENERATION_BITS) | (time.time_ns() >> _CLOCK_BITS),
            recovering=self._recovering,
            now=self._clock.elapsed(),
        )
        super()._serve()

    # -- the state machine

    def execute(self, op: int, entry: Entry) -> None:
        """Carry out an entry of the log, and answer the client whose request it is."""
        outcome: Outcome | Waiting | None = None
        if entry.number:
            outcome = self._contents.change(entry)
        elif entry.code == REPLACE:
            self._contents.replace(entry)
            self._follow_replacements()
        proposal = self._proposals.pop(op, None)
        if proposal is None:
            return
        if proposal.entry is not entry:
            outcome = self._redirect()
        elif entry.code == REPLACE:
            outcome = self._replacement(proposal.fields[0].decode())
        elif outcome is None and not proposal.peer.closed:
            outcome = self._contents.read(proposal.code, proposal.fields, self._waking(proposal.peer))
        if outcome is not None:
            proposal.outcome = outcome
            if proposal.peer.wait is not None:
                self._woken.append((proposal.peer, outcome))

    def snapshot(self) -> tuple[bytes, ...]:
        """Return all that the store holds."""
        return self._contents.snapshot()

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        """Hold what another replica's snapshot does."""
        self._redirect_clients()
        self._contents.restore(snapshot)
        self._follow_replacements()

    # -- clients

    def _carry_out(self, peer: Peer, code: int, fields: Sequence[bytes]) -> Outcome | Waiting | None:
        if code in KINDS:
            message = Message.decode(code, fields)
            self._indices[peer] = message.sender
            self._after(self._replica.on_message(message))
            return None
        if code != SUBMIT or len(fields) < 3 or len(fields[0]) != SESSION_BYTES:
            raise ProtocolError(f"there is no request {code} of a replica")
        if not self._replica.is_primary or self._replica.is_cut_off:
            return self._redirect()
        if self._told.get(peer, 0) < self._version:
            self._told[peer] = self._version
            return Reply.REDIRECT, [str(self._index).encode(), *self._addresses()]
        if number(fields[2]) == REFRESH:
            return Reply.OK, []
        return self._propose(peer, fields[0], number(fields[1]), number(fields[2]), fields[3:])

    def _propose(
        self, peer: Peer, session: bytes, turn: int, code: int, fields: Sequence[bytes]
    ) -> Outcome | Waiting:
        if code not in _CODES or (turn == 0) != (code in UNNUMBERED) or not 0 <= turn < 1 << 63:
            raise ProtocolError(f"request {code} with number {turn}")
        if sum(map(len, fields)) > MAX_REQUEST:
            raise ProtocolError(f"a request of more than {MAX_REQUEST} bytes")
        if code == REPLACE:
            replacing = self._replacing(fields)
            if not isinstance(replacing, Entry):
                return replacing
            entry = replacing
        else:
            entry = Entry() if code in READS else Entry(session, turn, code, tuple(fields))
        proposal = _Proposal(peer, entry, code, fields)
        self._proposals[self._replica.op + 1] = proposal
        self._after(self._replica.submit(entry))
        if proposal.outcome is not None:  # there is no other replica
            return proposal.outcome
        return Waiting(PendingWait((), _nothing), _PARKED_SECONDS)

    def _redirect(self) -> Outcome:
        """Return the reply that sends a client to the primary, or to look for one."""
        replica = self._replica
        is_known = replica.is_normal and not replica.is_cut_off and replica.primary != self._index
        named = str(replica.primary).encode() if is_known else b""
        if replica.is_normal and self._version:
            return Reply.REDIRECT, [named, *self._addresses()]
        return Reply.REDIRECT, [named] if named else []

    def _redirect_clients(self) -> None:
        self._proposals.clear()
        woken = {peer for peer, _ in self._woken}
        for peer in self._peers - woken:
            if peer.wait is not None:
                self._table.cancel(peer.wait)
                self._woken.append((peer, self._redirect()))

    # -- replicas that are replaced

    def _replacing(self, fields: Sequence[bytes]) -> Entry | Outcome:
        """Return the entry by which a lost replica is replaced; or the answer, if none needs to be."""
        if len(fields) != 2:
            raise ProtocolError(f"a replacement with {len(fields)} fields")
        try:
            address = str(parse_address(fields[0].decode()))
        except (InvalidArgumentError, UnicodeDecodeError) as error:
            raise ProtocolError(str(error)) from None
        answer = self._replacement(address)
        silent_s = max(VIEW_CHANGE_TIMEOUT_S, number(fields[1]) / 1000)
        if answer[0] is Reply.OK or (index := self._replica.lost(silent_s)) is None:
            return answer
        generation = self._contents.replacements.get(index, (0, ""))[0] + 1
        return Entry(code=REPLACE, fields=replacement_fields(index, generation, address))

    def _replacement(self, address: str) -> Outcome:
        """Tell which replica is to be at an address, and of which generation; that none is, if so."""
        for index, (generation, text) in self._contents.replacements.items():
            if parse_address(text) == parse_address(address):
                head = str(index).encode(), str(generation).encode()
                return Reply.OK, [*head, *self._addresses()]
        return Reply.EMPTY, []

    def _addresses(self) -> list[bytes]:
        """Return the version of the addresses, and these."""
        return [str(self._version).encode(), *(str(each).encode() for each in self._replicas)]

    def _follow_replacements(self) -> None:
        """Turn to those that have replaced others."""
        replacements = self._contents.replacements
        self._version = sum(generation for generation, _ in replacements.values())
        for index, (_, text) in replacements.items():
            if index < len(self._replicas) and self._replicas[index] != (address := parse_address(text)):
                self._replicas[index] = address
                self._replica.expect(index)
                if (link := self._links.get(index)) is not None:
                    self._drop(link)

    # -- the other replicas

    def _after(self, messages: Messages) -> None:
        """Send the replica's messages, and look at whether it serves clients."""
        for receiver, message in messages:
            link = self._links.get(receiver)
            if link is None:
                continue
            buffers = encode(message.kind, message.encode())
            self._guarded(link, lambda link, buffers=buffers: link.send(buffers))  # type: ignore[misc]
            if link.backlog > _MAX_UNSENT:  # it is stopped; what it missed it asks for later
                self._drop(link)
        serves = self._replica.is_primary and not self._replica.is_cut_off
        if self._served and not serves:
            self._redirect_clients()
        self._served = serves

    def _expire(self) -> None:
        super()._expire()
        while self._dialed:
            self._link(*self._dialed.popleft())
        self._after(self._replica.on_tick(self._clock.elapsed()))
        self._deliver_woken()

    def _time_to_next(self) -> float:
        if self._dialed:
            return 0.0
        sooner = super()._time_to_next()
        return _TICK_S if sooner is None else min(_TICK_S, sooner)

    def _drop(self, peer: Peer) -> None:
        super()._drop(peer)
        self._told.pop(peer, None)
        for other, link in list(self._links.items()):
            if link is peer:
                del self._links[other]
                self._lost[other].set()
        if (index := self._indices.pop(peer, None)) is not None:
            self._after(self._replica.on_disconnect(index))

    def _link(self, other: int, address: Address, connection: socket.socket) -> None:
        """Use a connection to another replica from now on, unless that has been replaced."""
        if address != self._replicas[other]:
            connection.close()
            self._lost[other].set()
            return
        link = Peer(connection, None)
        link.stage, link.own = Stage.READY, True
        try:
            self._selector.register(connection, selectors.EVENT_READ, link)
        except (OSError, ValueError):
            connection.close()
            self._lost[other].set()
            return
        self._peers.add(link)
        self._links[other] = link

    def _dial(self, other: int) -> None:
        """Connect to another replica whenever there is no connection to it.

        Of this thread and the one that serves, one closes a connection that comes too late: the server ends
        before it closes those dialed, and this thread looks for that end after it has added one.
        """
        lost, warned = self._lost[other], False
        while not self._closing:
            if not lost.wait(1.0) or self._closing:
                continue
            address = self._replicas[other]
            try:
                connection = Connection(address, self._secret, time.monotonic() + _DIAL_SECONDS)
            except OSError:
                time.sleep(_BETWEEN_DIALS_S)
                continue
            except DistNetworkError as error:
                if not warned:
                    warned = True
                    _log.warning("%r: %s", self, error)
                time.sleep(_DIAL_SECONDS)
                continue
            lost.clear()
            self._dialed.append((other, address, connection.detach()))
            if self._closing:
                self._close_dialed()
            with contextlib.suppress(OSError):
                self._waker.send(b"x")

    def _release(self) -> None:
        super()._release()
        self._close_dialed()

    def _close_dialed(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while True:
                self._dialed.popleft()[2].close()


def _nothing() -> None:
    pass
