"""Messages between two ranks of a group on several hosts: send, recv, isend, irecv.

Within a host they go through the mailbox of the arena. To another host the sender writes a letter
(correspondence.py) that offers what it has; a small message is in it. The receiver matches what is offered
with what it wants, in the order of both, by source and tag. The first megabyte of a larger message follows
the offer at once, in letters; what remains is then asked for, and comes over the same line as the letters,
straight into its place. So there is no gap on the network until that is asked for, and there is no more at a
receiver of what nobody waits for than some megabytes from each sender: beyond that everything is asked for.

A send has ended when the tensor may be changed: at once if all of it is in letters, which reach their
receiver though the sender leaves; else when the receiver says that it has got it.

A receive from any source waits in the mailbox and for letters at once. What comes first is taken; a
letter's message only if the mailbox has not begun with one and gives the receive back (Mailbox.retract).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable

import torch

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.layout import RECEIVED, SENT
from torchestra.engine.multihost.bridge import Bridge, BridgeError
from torchestra.engine.multihost.bridge_selection import open_bridge
from torchestra.engine.multihost.correspondence import Correspondence
from torchestra.engine.multihost.hierarchy import Hierarchy, bytes_of
from torchestra.engine.multihost.letters import ENCLOSED_BYTES, Letter, What, warnings
from torchestra.engine.multihost.message_recorder import Entry, MessageRecorder
from torchestra.engine.multihost.p2p_request import Ahead, P2PRequest, Patient, UnexpectedMessage
from torchestra.engine.multihost.wait_policy import WaitPolicy
from torchestra.engine.operations import DTYPE_NAMES
from torchestra.engine.p2p import Mailbox, Transfer
from torchestra.errors import (
    DistBackendError,
    DistError,
    GroupAbortedError,
    GroupDestroyedError,
)
from torchestra.store import PrefixStore, Store

__all__ = ["Messages"]

_SMALL_BYTES = 64 << 10
_LOOK_SECONDS = 0.05
_LONGEST_PAUSE = 1.0
_MEET_SECONDS = 120.0

Done = Callable[[Transfer], None]


class Messages:
    """One rank's messages.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        hierarchy: the group's.
        bridge: the kind of the lines.
        key: of the group, that only its ranks know.
    """

    def __init__(self, store: Store, hierarchy: Hierarchy, bridge: str, key: bytes) -> None:
        self._hierarchy = hierarchy
        self._hosts = hierarchy.hosts
        self._member = hierarchy.member
        self._mailbox: Mailbox = hierarchy.local.mailbox
        self._store, self.bridge_kind = store, bridge
        self._whose = f"group {hierarchy.name!r}, rank {hierarchy.rank}: "
        self._lock = threading.RLock()
        self._letters = Correspondence(
            store,
            hierarchy.rank,
            frozenset(range(len(self._hosts.host_of))).difference(hierarchy.here),
            key,
            f"torchestra-letters-{hierarchy.name}-{hierarchy.rank}",
            self._lock,
            self._open_bridge,
            self._read,
            self._lose_line,
            self._look_after_all,
            self._lose_store,
        )
        self._lookout = WaitPolicy(hierarchy, self._letters)
        self._journal = MessageRecorder(self._member)
        self._numbers = itertools.count(1)
        self._wanted: list[P2PRequest] = []  # receives that nothing has come for, in their order
        self._offers: list[UnexpectedMessage] = []  # what nobody has received yet, in the order of its coming
        self._outgoing: dict[int, P2PRequest] = {}  # by number: offered, and not yet got
        self._ahead = Ahead()
        self._coming: dict[tuple[int, int], P2PRequest] = {}  # by sender and number: what has been asked for
        self._closed = False
        _all.add(self)

    # -- calls

    def send(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        """See :meth:`LocalEngine.send`."""
        if self._is_here(rank):
            self._hierarchy.local.send(tensor, self._hosts.place_of[rank], tag, seconds)
        elif tensor.nbytes <= _SMALL_BYTES:
            self._send_small(tensor, rank, tag, background=False)
        else:
            self._wait(self._begin_far_send(tensor, rank, tag, seconds, None))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float) -> int:
        """See :meth:`LocalEngine.receive`."""
        if rank is not None and self._is_here(rank):
            place = self._hierarchy.local.receive(tensor, self._hosts.place_of[rank], tag, seconds)
            return self._hierarchy.here[place]
        return self._wait(self._begin_far_receive(tensor, rank, tag, seconds, None))

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Done
    ) -> Transfer | P2PRequest:
        """See :meth:`LocalEngine.begin_send`."""
        if self._is_here(rank):
            return self._hierarchy.local.begin_send(tensor, self._hosts.place_of[rank], tag, seconds, done)
        return self._begin_far_send(tensor, rank, tag, seconds, done)

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float, done: Done
    ) -> Transfer | P2PRequest:
        """See :meth:`LocalEngine.begin_receive`."""
        if rank is not None and self._is_here(rank):

            def end(transfer: Transfer) -> None:
                if transfer.error is None:
                    transfer.source = rank
                done(transfer)

            return self._hierarchy.local.begin_receive(tensor, self._hosts.place_of[rank], tag, seconds, end)
        return self._begin_far_receive(tensor, rank, tag, seconds, done)

    def wait(self, transfer: Transfer | P2PRequest) -> int:
        """See :meth:`Mailbox.wait`."""
        return self._wait(transfer) if isinstance(transfer, P2PRequest) else self._mailbox.wait(transfer)

    def look(self) -> None:
        """Have every message see now whether it is to be given up."""
        self._mailbox.look()
        self._look_after_all()

    def close(self) -> None:
        """End the thread; whatever is under way fails with GroupDestroyedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for parcel in self._under_way():
            self._fail(parcel, GroupDestroyedError(f"{parcel}, but the group was destroyed"))
        self.leave()

    def leave(self) -> None:
        """See that what was sent reaches its receivers, and send no more."""
        self._letters.close(in_vain=self._member.is_aborted)

    # -- beginning

    def _is_here(self, rank: int) -> bool:
        return self._hosts.host_of[rank] == self._hierarchy.host

    def _begin_far_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Done | None
    ) -> P2PRequest:
        parcel = P2PRequest(self._whose + "send", next(self._numbers), tensor, rank, tag, seconds, done)
        length = tensor.nbytes
        if length <= _SMALL_BYTES:
            self._send_small(tensor, rank, tag, background=True)
            parcel.finish()
            return parcel
        self._refuse_if_over(rank)
        self._letters.start()
        with self._begin_entry(parcel, SENT), self._lock:
            if self._letters.is_direct(rank):
                parcel.part = self._ahead.take(parcel.number, rank, length)
            part = parcel.part
            if part < length:
                self._outgoing[parcel.number] = parcel
                self._letters.hurry()
            kind = DTYPE_CODE[tensor.dtype]
            self._write(rank, Letter(What.offer, parcel.number, tag, kind, length, part))
            for start in range(0, part, ENCLOSED_BYTES):
                size = min(ENCLOSED_BYTES, part - start)
                enclosed = ctypes.string_at(tensor.data_ptr() + start, size)
                self._write(rank, Letter(What.part, parcel.number, enclosed=enclosed))
        if part == length:
            parcel.finish()
        return parcel

    def _send_small(self, tensor: torch.Tensor, rank: int, tag: int, *, background: bool) -> None:
        self._refuse_if_over(rank)
        length, kind = tensor.nbytes, DTYPE_CODE[tensor.dtype]
        with self._journal.begin(SENT, kind, tag, length, rank, background) as entry:
            enclosed = ctypes.string_at(tensor.data_ptr(), length)
            self._write(rank, Letter(What.offer, 0, tag, kind, length, 0, enclosed))
            entry.end(well=True)

    def _begin_far_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float, done: Done | None
    ) -> P2PRequest:
        self._refuse_if_over()
        self._letters.start()
        parcel = P2PRequest(self._whose + "recv", next(self._numbers), tensor, rank, tag, seconds, done)
        with self._begin_entry(parcel, RECEIVED), self._lock:
            offer = next((offer for offer in self._offers if parcel.takes(offer)), None)
            if offer is not None:
                self._offers.remove(offer)
                self._match(parcel, offer)
                return parcel
            self._wanted.append(parcel)
            self._letters.hurry()
            if rank is None:
                self._post_here(parcel, tensor)
        return parcel

    def _begin_entry(self, parcel: P2PRequest, way: int) -> Entry:
        kind, background = DTYPE_CODE[parcel.tensor.dtype], parcel.done is not None
        length = parcel.tensor.nbytes
        parcel.entry = self._journal.begin(way, kind, parcel.tag, length, parcel.peer, background)
        return parcel.entry

    def _post_here(self, parcel: P2PRequest, tensor: torch.Tensor) -> None:
        """Have a receive from any source wait in the mailbox as well."""

        def end(transfer: Transfer) -> None:
            with self._lock:
                if parcel not in self._wanted:
                    return
                self._wanted.remove(parcel)
            if transfer.error is not None:
                parcel.finish(transfer.error)
            else:
                parcel.finish(source=self._hierarchy.here[transfer.source])

        kind, waiter = DTYPE_CODE[tensor.dtype], Patient(self._member)
        parcel.here = self._mailbox.irecv(
            tensor.data_ptr(), tensor.nbytes, kind, None, parcel.tag, waiter, end, recorded=False
        )

    def _refuse_if_over(self, rank: int | None = None) -> None:
        """Raise if nothing can be begun any more, with a rank."""
        if self._member.is_aborted:
            raise self._member.aborted()
        if rank is not None and self._letters.has_left(rank):
            raise GroupAbortedError(
                f"{self._whose}{self._hosts.describe(rank)}, to which this rank sends, destroyed the group"
            )

    def _write(self, rank: int, letter: Letter) -> None:
        try:
            self._letters.write(rank, letter)
        except (DistError, OSError) as error:
            self._lose_store(error)
            raise self._member.aborted() from error

    # -- waiting

    def _wait(self, parcel: P2PRequest) -> int:
        try:
            while not parcel.wait(_LOOK_SECONDS):
                self._look_after(parcel)
        except BaseException as error:
            # A message in the background goes on when the program that waits for it is interrupted.
            if not parcel.finished and (parcel.done is None or isinstance(error, DistError)):
                self._withdraw(parcel, error)
            raise
        if parcel.error is not None:
            raise parcel.error
        return parcel.source

    def _under_way(self) -> list[P2PRequest]:
        with self._lock:
            return [*self._wanted, *self._outgoing.values(), *self._coming.values()]

    def _look_after_all(self) -> float:
        """Give up what waits in vain; for how long nobody need look again."""
        parcels = self._under_way()
        for parcel in parcels:
            if parcel.done is not None:
                try:
                    self._look_after(parcel)
                except DistError as error:
                    self._withdraw(parcel, error)
        if any(parcel.doubt is not None for parcel in parcels):
            return _LOOK_SECONDS
        return min([_LONGEST_PAUSE, *(max(_LOOK_SECONDS, parcel.deadline.remaining()) for parcel in parcels)])

    def _look_after(self, parcel: P2PRequest) -> None:
        """Raise if waiting for a message any longer is in vain."""
        if self._closed:
            raise GroupDestroyedError(f"{parcel}, but the group was destroyed")
        self._hierarchy.detector.stand_in_if_needed()
        self._lookout.check(parcel)

    def _withdraw(self, parcel: P2PRequest, error: BaseException) -> None:
        """Take a message back that its caller leaves with an error."""
        aborted = self._member.is_aborted
        with self._lock:
            if parcel.partner is not None:
                if not (aborted or isinstance(error, DistError)):
                    who = self._hosts.describe(self._hierarchy.rank)
                    self._member.abort(
                        f"{who} left a {parcel.what} halfway, with {type(error).__name__}: {error}"
                    )
                elif not aborted and parcel.receives:
                    self._write(parcel.partner, Letter(What.lost, parcel.offered))
            elif parcel in self._wanted:
                if parcel.here is not None and not self._mailbox.retract(parcel.here):
                    return  # the mailbox has begun with it, and ends it
            elif parcel.number in self._outgoing and not (aborted or parcel.peer is None):
                self._write(parcel.peer, Letter(What.withdraw, parcel.number))
            self._fail(parcel, error)

    def _fail(self, parcel: P2PRequest, error: BaseException) -> None:
        with self._lock:
            if not parcel.receives:
                self._settle(parcel.number)
            elif parcel.partner is not None:
                self._coming.pop((parcel.partner, parcel.offered), None)
            else:
                self._wanted = [each for each in self._wanted if each is not parcel]
        parcel.finish(error)

    def _settle(self, number: int) -> P2PRequest | None:
        """Nothing more is to be done for a message that was offered."""
        self._ahead.settle(number)
        return self._outgoing.pop(number, None)

    def _lose_store(self, error: Exception) -> None:
        who = self._hosts.describe(self._hierarchy.rank)
        self._member.abort(f"{who} cannot reach the group's store any more: {error}")

    def _lose_line(self, rank: int, why: str) -> None:
        """The line to a rank has broken; why will be seen (see :meth:`_look_after`)."""
        for parcel in self._under_way():
            if parcel.partner == rank:
                parcel.fail_way(why)

    # -- letters

    def _open_bridge(self, rank: int) -> Bridge:
        ends = sorted((self._hierarchy.rank, rank))
        store = PrefixStore(f"line/{ends[0]}-{ends[1]}", self._store)
        names = [self._hosts.describe(end) for end in ends]
        return open_bridge(self.bridge_kind, store, ends.index(self._hierarchy.rank), 2, names, _MEET_SECONDS)

    def _read(self, sender: int, letter: Letter) -> None:
        """Do what a letter says. The lock is held."""
        number = letter.message
        if letter.what == What.offer:
            self._take_offer(UnexpectedMessage(sender, *letter[1:]))
        elif letter.what == What.part:
            self._take_part(sender, number, letter.enclosed)
        elif letter.what == What.withdraw:
            self._offers = [each for each in self._offers if (each.source, each.number) != (sender, number)]
        elif letter.what == What.ask:
            self._push(sender, number)
        elif (parcel := self._settle(number)) is not None:
            lost = letter.what == What.lost
            parcel.finish(self._lookout.failure(parcel, "its end of it broke") if lost else None)
        if not self._wanted and not self._outgoing and not self._coming:
            self._letters.awaited = False

    def _take_offer(self, offer: UnexpectedMessage) -> None:
        if not offer.is_possible(_SMALL_BYTES):
            warnings.warn("%sdropped what rank %d cannot have sent", self._whose, offer.source)
            return
        for parcel in tuple(self._wanted):
            if parcel.takes(offer) and (parcel.here is None or self._mailbox.retract(parcel.here)):
                self._wanted.remove(parcel)
                self._match(parcel, offer)
                return
        self._offers.append(offer)

    def _match(self, parcel: P2PRequest, offer: UnexpectedMessage) -> None:
        """A receive has got an offer."""
        tensor = parcel.tensor
        kind = DTYPE_CODE[tensor.dtype]
        small = offer.length <= _SMALL_BYTES
        if (offer.kind, offer.length) != (kind, tensor.nbytes):
            if not small:
                self._write(offer.source, Letter(What.refuse, offer.number))
            parcel.finish(
                DistBackendError(
                    f"{self._whose}rank {offer.source} sent {offer.length} bytes of"
                    f" {DTYPE_NAMES[offer.kind]} with tag {offer.tag}, but recv expected"
                    f" {tensor.nbytes} bytes of {DTYPE_NAMES[kind]}. The message was thrown away; size"
                    " and dtype must be the same on both sides"
                )
            )
        elif small:
            ctypes.memmove(tensor.data_ptr(), bytes(offer.enclosed), len(offer.enclosed))
            parcel.finish(source=offer.source)
        else:
            self._expect(parcel, offer)

    # -- large messages

    def _expect(self, parcel: P2PRequest, offer: UnexpectedMessage) -> None:
        """Have a message come."""
        source = offer.source
        parcel.partner, parcel.offered, parcel.part = source, offer.number, offer.part
        self._coming[source, offer.number] = parcel
        if parcel.entry is not None:
            parcel.entry.came(source)
        rest = offer.length - offer.part
        if rest and not self._ask(parcel, rest):
            return
        if offer.enclosed:
            self._take_part(source, offer.number, bytes(offer.enclosed))

    def _ask(self, parcel: P2PRequest, rest: int) -> bool:
        """Have what is not in letters come; False if it cannot."""

        def then(error: BridgeError | None) -> None:
            with self._lock:
                if error is None:
                    self._get(parcel, rest)
                else:
                    parcel.fail_way(str(error))

        assert parcel.partner is not None
        try:
            line = self._letters.line_to(parcel.partner)
            line.receive(bytes_of(parcel.tensor)[parcel.part :], parcel.seconds, then)
        except BridgeError as error:
            self._withdraw(parcel, self._lookout.failure(parcel, str(error)))
            return False
        self._write(parcel.partner, Letter(What.ask, parcel.offered))
        return True

    def _take_part(self, source: int, number: int, part: bytes) -> None:
        """A part of a message has come in a letter."""
        if (parcel := self._coming.get((source, number))) is not None:
            if parcel.take_part(part):
                self._get(parcel, len(part))
            else:
                warnings.warn("%sdropped %d bytes of rank %d too many", self._whose, len(part), source)
            return
        for offer in self._offers:
            if (offer.source, offer.number) == (source, number):
                offer.enclosed = (offer.enclosed + part)[: offer.part]

    def _get(self, parcel: P2PRequest, length: int) -> None:
        """So many bytes of a message have come; with the last of them it is there."""
        parcel.got += length
        if parcel.got < parcel.tensor.nbytes or parcel.finished:
            return
        assert parcel.partner is not None
        self._coming.pop((parcel.partner, parcel.offered), None)
        parcel.finish(source=parcel.partner)
        self._write(parcel.partner, Letter(What.got, parcel.offered))

    def _push(self, receiver: int, number: int) -> None:
        """What remains of a message has been asked for."""
        parcel = self._outgoing.get(number)
        if parcel is None:
            self._member.abort(
                f"rank {receiver} asked rank {self._hierarchy.rank} for a message that was taken back"
            )
            return
        parcel.partner = receiver

        def then(error: BridgeError | None) -> None:
            if error is not None:
                parcel.fail_way(str(error))

        try:
            line = self._letters.line_to(receiver)
            line.send(bytes_of(parcel.tensor)[parcel.part :], parcel.seconds, then)
        except BridgeError as error:
            parcel.fail_way(str(error))


_all: weakref.WeakSet[Messages] = weakref.WeakSet()


def _leave_at_exit() -> None:
    """While the lines are there: a bridge over Gloo closes its own at exit, later (gloo_bridge.py)."""
    for messages in tuple(_all):
        with contextlib.suppress(DistError, OSError):
            messages.leave()


atexit.register(_leave_at_exit)
