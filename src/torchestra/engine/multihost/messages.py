"""Messages between two ranks of a group on several hosts: send, recv, isend, irecv.

Within a host they go through the mailbox of the arena. To another host the sender writes a letter
(letters.py) that says what it has; a small message is in it. The receiver matches what is offered with what
it wants, in the order of both, by source and tag; a larger message is then asked for, and comes over a
*pipe*: a bridge with two ends, one for each pair and direction, whose ends move messages in the order in
which they were asked for. So nothing large is sent that nobody waits for.

A receive from any source waits in the mailbox and for letters at once. What comes first is taken; a
letter's message only if the mailbox has not begun with one and gives the receive back (Mailbox.retract).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from torchestra.engine.channels import Mailbox, Transfer
from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.member import Member
from torchestra.engine.multihost.bridge import Bridge, BridgeError
from torchestra.engine.multihost.crossing import Crossing, bytes_of
from torchestra.engine.multihost.letters import Letter, Postman
from torchestra.engine.multihost.opening import open_bridge
from torchestra.engine.multihost.parcel import Offer, Parcel
from torchestra.engine.operations import DTYPE_NAMES
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    GroupDestroyedError,
    RankFailedError,
)
from torchestra.store import PrefixStore, Store

__all__ = ["Messages"]

_INLINE_BYTES = 16 << 10
_LOOK_SECONDS = 0.05
_LONGEST_PAUSE = 1.0

Done = Callable[[Transfer], None]


class Messages:
    """One rank's messages.

    Args:
        store: one that only the ranks of this group, and only for this purpose, use.
        crossing: the group's.
        threads: the ranks are threads of this process.
    """

    def __init__(self, store: Store, crossing: Crossing, *, threads: bool) -> None:
        self._crossing = crossing
        self._hosts = crossing.hosts
        self._member = crossing.member
        self._mailbox: Mailbox = crossing.local.mailbox
        self._store, self._threads = store, threads
        name = f"torchestra-letters-{crossing.name}-{crossing.rank}"
        self._post = Postman(store, crossing.rank, name, self._read, self._look_after_all, self._lose_store)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._wanted: list[Parcel] = []  # receives that nothing has come for, in their order
        self._offers: list[Offer] = []  # what nobody has received yet, in the order of its coming
        self._outgoing: dict[int, Parcel] = {}  # by number: what has been offered, and not been asked for
        self._moving: set[Parcel] = set()
        self._pipes: dict[tuple[int, int], Bridge] = {}
        self._closed = False

    # -- calls

    def send(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        """See :meth:`LocalEngine.send`."""
        if self._is_here(rank):
            self._crossing.local.send(tensor, self._hosts.place_of[rank], tag, seconds)
        else:
            self._wait(self._begin_far_send(tensor, rank, tag, seconds, None))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float) -> int:
        """See :meth:`LocalEngine.receive`."""
        if rank is not None and self._is_here(rank):
            place = self._crossing.local.receive(tensor, self._hosts.place_of[rank], tag, seconds)
            return self._crossing.here[place]
        return self._wait(self._begin_far_receive(tensor, rank, tag, seconds, None))

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Done
    ) -> Transfer | Parcel:
        """See :meth:`LocalEngine.begin_send`."""
        if self._is_here(rank):
            return self._crossing.local.begin_send(tensor, self._hosts.place_of[rank], tag, seconds, done)
        return self._begin_far_send(tensor, rank, tag, seconds, done)

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float, done: Done
    ) -> Transfer | Parcel:
        """See :meth:`LocalEngine.begin_receive`."""
        if rank is not None and self._is_here(rank):

            def end(transfer: Transfer) -> None:
                if transfer.error is None:
                    transfer.source = rank
                done(transfer)

            return self._crossing.local.begin_receive(tensor, self._hosts.place_of[rank], tag, seconds, end)
        return self._begin_far_receive(tensor, rank, tag, seconds, done)

    def wait(self, transfer: Transfer | Parcel) -> int:
        """See :meth:`Mailbox.wait`."""
        return self._wait(transfer) if isinstance(transfer, Parcel) else self._mailbox.wait(transfer)

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
        self._post.close()
        for parcel in self._under_way():
            self._fail(parcel, GroupDestroyedError(f"{parcel}, but the group was destroyed"))
        for pipe in self._pipes.values():
            pipe.close()

    # -- beginning

    def _is_here(self, rank: int) -> bool:
        return self._hosts.host_of[rank] == self._crossing.host

    def _begin_far_send(
        self, tensor: torch.Tensor, rank: int, tag: int, seconds: float, done: Done | None
    ) -> Parcel:
        self._refuse_if_over()
        parcel = Parcel(self._described("send"), next(self._numbers), tensor, rank, tag, seconds, done)
        words = {
            "what": "offer",
            "number": parcel.number,
            "tag": tag,
            "kind": DTYPE_CODE[tensor.dtype],
            "bytes": tensor.nbytes,
        }
        if tensor.nbytes <= _INLINE_BYTES:
            self._write(rank, words, bytes_of(tensor).numpy().tobytes())
            parcel.finish()
            return parcel
        with self._lock:
            self._outgoing[parcel.number] = parcel
        self._post.start()
        self._write(rank, words)
        return parcel

    def _begin_far_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, seconds: float, done: Done | None
    ) -> Parcel:
        self._refuse_if_over()
        self._post.start()
        parcel = Parcel(self._described("recv"), next(self._numbers), tensor, rank, tag, seconds, done)
        with self._lock:
            offer = next((offer for offer in self._offers if parcel.takes(offer)), None)
            if offer is not None:
                self._offers.remove(offer)
                self._match(parcel, offer)
                return parcel
            self._wanted.append(parcel)
            if rank is None:
                self._post_here(parcel, tensor)
        return parcel

    def _post_here(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Have a receive from any source wait in the mailbox as well."""

        def end(transfer: Transfer) -> None:
            with self._lock:
                if parcel not in self._wanted:
                    return
                self._wanted.remove(parcel)
            if transfer.error is not None:
                parcel.finish(transfer.error)
            else:
                parcel.finish(source=self._crossing.here[transfer.source])

        kind, waiter = DTYPE_CODE[tensor.dtype], _Patient(self._member)
        parcel.here = self._mailbox.irecv(
            tensor.data_ptr(), tensor.nbytes, kind, None, parcel.tag, waiter, end
        )

    def _described(self, what: str) -> str:
        return f"group {self._crossing.name!r}, rank {self._crossing.rank}: {what}"

    def _refuse_if_over(self) -> None:
        if self._member.is_aborted:
            raise self._member.aborted()

    def _write(self, rank: int, words: dict[str, Any], enclosed: bytes = b"") -> None:
        try:
            self._post.write(rank, Letter(words, enclosed))
        except (DistError, OSError) as error:
            self._lose_store(error)
            raise self._member.aborted() from error

    # -- waiting

    def _wait(self, parcel: Parcel) -> int:
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

    def _under_way(self) -> list[Parcel]:
        with self._lock:
            return [*self._wanted, *self._outgoing.values(), *self._moving]

    def _look_after_all(self) -> float:
        """Give up what waits in vain; for how long nobody need look again."""
        parcels = self._under_way()
        for parcel in parcels:
            if parcel.done is not None:
                try:
                    self._look_after(parcel)
                except DistError as error:
                    self._withdraw(parcel, error)
        return min([_LONGEST_PAUSE, *(max(_LOOK_SECONDS, parcel.remaining()) for parcel in parcels)])

    def _look_after(self, parcel: Parcel) -> None:
        """Raise if waiting for a message any longer is in vain."""
        if self._member.is_aborted:
            raise self._member.aborted()
        if self._closed:
            raise GroupDestroyedError(f"{parcel}, but the group was destroyed")
        if parcel in self._moving:
            return
        outlook = self._crossing.outlook
        if parcel.peer is not None and (fate := outlook.fate(parcel.peer)) is not None:
            who = self._hosts.describe(parcel.peer)
            why = f"{who} {fate}; {self._hosts.describe(self._crossing.rank)} saw it in {parcel.what}"
            if fate == "died":
                raise RankFailedError(f"{parcel}: {why}", (parcel.peer,))
            raise GroupAbortedError(f"{parcel}: {why}")
        if parcel.remaining() <= 0:
            others = self._everybody_else() if parcel.peer is None else (parcel.peer,)
            raise CollectiveTimeoutError(
                f"{parcel} timed out after {parcel.seconds:.1f} s; the group stays usable."
                f"{outlook.ask_where_they_are()}{self._member.report([self._crossing.place])}",
                others,
            )

    def _everybody_else(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(len(self._hosts.host_of)) if rank != self._crossing.rank)

    def _withdraw(self, parcel: Parcel, error: BaseException) -> None:
        """Take a message back that its caller leaves with an error."""
        with self._lock:
            if parcel in self._moving:
                if not self._member.is_aborted:
                    who = self._hosts.describe(self._crossing.rank)
                    self._member.abort(
                        f"{who} left a {parcel.what} halfway, with {type(error).__name__}: {error}"
                    )
            elif parcel.number in self._outgoing and not parcel.receives:
                del self._outgoing[parcel.number]
                if not self._member.is_aborted and parcel.peer is not None:
                    self._write(parcel.peer, {"what": "withdraw", "number": parcel.number})
            elif parcel in self._wanted:
                if parcel.here is not None and not self._mailbox.retract(parcel.here):
                    return  # the mailbox has begun with it, and ends it
                if parcel in self._wanted:
                    self._wanted.remove(parcel)
        parcel.finish(error)

    def _fail(self, parcel: Parcel, error: BaseException) -> None:
        with self._lock:
            self._wanted = [each for each in self._wanted if each is not parcel]
            self._outgoing.pop(parcel.number, None) if not parcel.receives else None
            self._moving.discard(parcel)
        parcel.finish(error)

    def _lose_store(self, error: Exception) -> None:
        who = self._hosts.describe(self._crossing.rank)
        self._member.abort(f"{who} cannot reach the group's store any more: {error}")

    # -- letters

    def _read(self, letter: Letter) -> None:
        """Do what a letter says."""
        words = letter.words
        sender = words["from"]
        with self._lock:
            if words["what"] == "offer":
                offer = Offer(
                    sender, words["number"], words["tag"], words["kind"], words["bytes"], letter.enclosed
                )
                for parcel in tuple(self._wanted):
                    if parcel.takes(offer) and (parcel.here is None or self._mailbox.retract(parcel.here)):
                        self._wanted.remove(parcel)
                        self._match(parcel, offer)
                        return
                self._offers.append(offer)
            elif words["what"] == "withdraw":
                self._offers = [
                    offer
                    for offer in self._offers
                    if (offer.source, offer.number) != (sender, words["number"])
                ]
            elif words["what"] == "ask":
                self._push(sender, words["number"], words["wanted"])

    def _match(self, parcel: Parcel, offer: Offer) -> None:
        """A receive has got an offer."""
        tensor = parcel.tensor
        kind = DTYPE_CODE[tensor.dtype]
        fits = (offer.kind, offer.length) == (kind, tensor.nbytes)
        small = offer.length <= _INLINE_BYTES
        if not fits:
            if not small:
                self._write(offer.source, {"what": "ask", "number": offer.number, "wanted": False})
            parcel.finish(
                DistBackendError(
                    f"{self._described('')[:-2]}: rank {offer.source} sent {offer.length} bytes of"
                    f" {DTYPE_NAMES[offer.kind]} with tag {offer.tag}, but recv expected"
                    f" {tensor.nbytes} bytes of {DTYPE_NAMES[kind]}. The message was thrown away; size"
                    " and dtype must be the same on both sides"
                )
            )
        elif small:
            if offer.length:
                bytes_of(tensor).copy_(torch.frombuffer(bytearray(offer.enclosed), dtype=torch.uint8))
            parcel.finish(source=offer.source)
        else:
            self._moving.add(parcel)
            pipe = self._pipe(offer.source, self._crossing.rank)
            pending = pipe.broadcast(bytes_of(tensor), 0, parcel.seconds)
            self._write(offer.source, {"what": "ask", "number": offer.number, "wanted": True})
            self._await(parcel, pending, offer.source)

    def _push(self, receiver: int, number: int, wanted: bool) -> None:
        """A message that was offered has been asked for, or is not wanted as it is."""
        parcel = self._outgoing.pop(number, None)
        if not wanted:
            if parcel is not None:
                parcel.finish()
            return
        if parcel is None:
            self._member.abort(
                f"rank {receiver} asked rank {self._crossing.rank} for a message that was taken back"
            )
            return
        self._moving.add(parcel)
        pipe = self._pipe(self._crossing.rank, receiver)
        self._await(parcel, pipe.broadcast(bytes_of(parcel.tensor), 0, parcel.seconds), receiver)

    def _pipe(self, source: int, target: int) -> Bridge:
        key = (source, target)
        if key not in self._pipes:
            store = PrefixStore(f"pipe/{source}-{target}", self._store)
            end = 0 if source == self._crossing.rank else 1
            self._pipes[key] = open_bridge(store, end, 2, self._crossing.outlook.bound, threads=self._threads)
        return self._pipes[key]

    def _await(self, parcel: Parcel, pending: Any, peer: int) -> None:
        """Have a thread wait for the end of a message on its way."""

        def wait() -> None:
            error: BaseException | None = None
            try:
                while not pending.wait(_LOOK_SECONDS):
                    self._look_after(parcel)
                    if (fate := self._crossing.outlook.fate(peer)) == "died":
                        raise RankFailedError(f"{parcel}: {self._hosts.describe(peer)} {fate}", (peer,))
            except BridgeError as failure:
                error = DistBackendError(
                    f"{parcel}: the way to {self._hosts.describe(peer)} failed: {failure}"
                )
            except DistError as failure:
                error = failure
            with self._lock:
                self._moving.discard(parcel)
            parcel.finish(error, source=peer)

        threading.Thread(target=wait, name=f"torchestra-message-{parcel.number}", daemon=True).start()


class _Patient:
    """Waits in the mailbox for a message that may come from elsewhere as well (see Waiter)."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def check(self, doing: str, blocked: int | None, started: float, suspect: int | None) -> int | None:
        if self._member.is_aborted:
            raise self._member.aborted()
        return None

    def abort(self, reason: str) -> None:
        self._member.abort(reason)
