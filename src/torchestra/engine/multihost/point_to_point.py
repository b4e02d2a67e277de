"""Messages between two ranks of a group on several hosts: send, recv, isend, irecv.

Within a host they go through the mailbox of the arena. To another host the sender announces what it has (a
request to send); a small message is in that, and the first megabyte of a larger one. The receiver matches
what is announced with what it wants, in the order of both, by source and tag. What remains of a large message
is sent when the receiver says that it may be (clear to send). So there is no gap on the network until then,
and a receiver holds at most some megabytes of unexpected data from each sender: beyond that the senders wait.

A send has ended when the tensor may be changed: at once if all of it is announced, else when the receiver
confirms that it has it; where the connection breaks before that, the rest is sent again over the next one. A
rank that leaves waits until what it has sent has come.

A receive from any source waits in the mailbox and for announcements at once. What comes first is taken; an
announced message only if the mailbox has not begun with one and gives the receive back (Mailbox.retract).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

import torch

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.layout import RECEIVED, SENT
from torchestra.engine.multihost.exposed_memory import ExposedMemory
from torchestra.engine.multihost.group_transport import Channel, GroupTransport
from torchestra.engine.multihost.hierarchy import Hierarchy, bytes_of
from torchestra.engine.multihost.message_recorder import MessageRecorder, RecordedMessage
from torchestra.engine.multihost.p2p_request import EagerCredits, P2PRequest, SenderWaiter, UnexpectedMessage
from torchestra.engine.multihost.packets import Packet, PacketType, pack, unpack, warnings
from torchestra.engine.multihost.periodic_thread import PeriodicThread
from torchestra.engine.multihost.wait_policy import WaitPolicy
from torchestra.engine.p2p.mailbox import Mailbox
from torchestra.engine.p2p.transfer import Transfer
from torchestra.errors import DistBackendError, DistError, GroupAbortedError, GroupDestroyedError
from torchestra.transport.message import Message

_SMALL_BYTES = 64 << 10
_POLL_SECONDS = 0.05
_LONGEST_PAUSE = 1.0

Done = Callable[[Transfer], None]


class PointToPoint:
    """One rank's messages.

    Args:
        bridge: the kind of bridge that collectives use between hosts.
    """

    def __init__(self, transport: GroupTransport, hierarchy: Hierarchy, bridge: str) -> None:
        self._hierarchy = hierarchy
        self._hosts = hierarchy.hosts
        self._context = hierarchy.context
        self._mailbox: Mailbox = hierarchy.local.mailbox
        self.transport, self._link, self.bridge_kind = transport, transport.link, bridge
        self._whose = f"group {hierarchy.name!r}, rank {hierarchy.rank}: "
        self._lock = threading.RLock()
        self._wait_policy = WaitPolicy(hierarchy, lambda rank: rank in self._left)
        self._recorder = MessageRecorder(self._context)
        self._request_ids = itertools.count(1)
        self.exposed = ExposedMemory()
        self._posted: list[P2PRequest] = []  # receives without a message yet, in order
        self._unexpected: list[UnexpectedMessage] = []  # no receive wants these yet; in order of arrival
        self._outgoing: dict[int, P2PRequest] = {}  # by number: announced, and not yet received
        self._credits = EagerCredits()
        self._coming: dict[tuple[int, int], P2PRequest] = {}  # by sender and number: what may be sent
        self._left: set[int] = set()  # ranks that have said that they leave
        self._peers: set[int] = set()  # ranks that have been sent something, or have sent
        self._thread = PeriodicThread(f"torchestra-messages-{hierarchy.name}", self._check_all)
        self._is_leaving = False
        transport.listen(Channel.p2p, self._arrived, self._lose_connection)
        transport.before_close(self.leave)

    # -- calls

    def send(self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        """See :meth:`LocalEngine.send`."""
        if self._is_here(rank):
            self._hierarchy.local.send(tensor, self._hosts.local_rank_of[rank], tag, timeout_s)
        elif tensor.nbytes <= _SMALL_BYTES:
            self._send_small(tensor, rank, tag, background=False)
        else:
            self._wait(self._begin_far_send(tensor, rank, tag, timeout_s, None))

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float) -> int:
        """See :meth:`LocalEngine.receive`."""
        if rank is not None and self._is_here(rank):
            local_rank = self._hierarchy.local.receive(
                tensor, self._hosts.local_rank_of[rank], tag, timeout_s
            )
            return self._hierarchy.here[local_rank]
        request = self._new_request("recv", tensor, rank, tag, timeout_s, None)
        try:  # from its beginning: a receive that an interrupt left behind would swallow a message
            self._post_receive(request)
            return self._wait(request)
        except BaseException as error:
            self._give_up(request, error)
            raise

    def begin_send(
        self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Done
    ) -> Transfer | P2PRequest:
        """See :meth:`LocalEngine.begin_send`."""
        if self._is_here(rank):
            return self._hierarchy.local.begin_send(
                tensor, self._hosts.local_rank_of[rank], tag, timeout_s, done
            )
        return self._begin_far_send(tensor, rank, tag, timeout_s, done)

    def begin_receive(
        self, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float, done: Done
    ) -> Transfer | P2PRequest:
        """See :meth:`LocalEngine.begin_receive`."""
        if rank is not None and self._is_here(rank):

            def end(transfer: Transfer) -> None:
                if transfer.error is None:
                    transfer.source = rank
                done(transfer)

            return self._hierarchy.local.begin_receive(
                tensor, self._hosts.local_rank_of[rank], tag, timeout_s, end
            )
        request = self._new_request("recv", tensor, rank, tag, timeout_s, done)
        self._post_receive(request)
        return request

    def begin_put(
        self, tensor: torch.Tensor, rank: int, window: int, offset: int, timeout_s: float, done: Done
    ) -> P2PRequest:
        """See :meth:`Engine.begin_put`."""
        request = self._new_request("put", tensor, rank, window, timeout_s, done)
        self._refuse_if_over(rank)
        with self._begin_entry(request, SENT), self._lock:
            self._outgoing[request.request_id] = request
            packet = Packet(PacketType.put, request.request_id, DTYPE_CODE[tensor.dtype], offset)
            self._write_parts(rank, packet, bytes_of(tensor), window, reliable=True)
        self._watch(request)
        return request

    def wait(self, transfer: Transfer | P2PRequest) -> int:
        """See :meth:`Mailbox.wait`."""
        return self._wait(transfer) if isinstance(transfer, P2PRequest) else self._mailbox.wait(transfer)

    def check(self) -> None:
        """Check now whether any message is to be given up."""
        self._mailbox.check()
        self._check_all()

    def close(self) -> None:
        """End the thread; messages under way fail with GroupDestroyedError."""
        with self._lock:
            if self._thread.has_ended:
                return
            self._thread.end()
        for request in self._under_way():
            self._fail(request, GroupDestroyedError(f"{request}, but the group was destroyed"))
        self.leave()

    def leave(self) -> None:
        """Wait until all messages sent have arrived, at most for the heartbeat bound; then send no more."""
        if self._is_leaving or self._context.is_aborted:
            return
        self._is_leaving = True
        for rank in tuple(self._peers - self._left):
            self._link.post_text(rank, Channel.p2p, 0, pack(Packet(PacketType.bye)))
        self._link.flush(self._hierarchy.detector.bound, self._is_unreachable)

    def _is_unreachable(self, rank: int) -> bool:
        """Return whether a rank receives nothing more; one that has only been pinged may be gone already."""
        return (
            rank in self._left
            or (rank not in self._peers and self._link.is_refused(rank))
            or self._context.is_aborted
            or self._hierarchy.detector.end_reason(rank) is not None
        )

    # -- beginning

    def _is_here(self, rank: int) -> bool:
        return self._hosts.host_of[rank] == self._hierarchy.host

    def _begin_far_send(
        self, tensor: torch.Tensor, rank: int, tag: int, timeout_s: float, done: Done | None
    ) -> P2PRequest:
        request = self._new_request("send", tensor, rank, tag, timeout_s, done)
        length = tensor.nbytes
        if length <= _SMALL_BYTES:
            self._send_small(tensor, rank, tag, background=True)
            request.finish()
            return request
        self._refuse_if_over(rank)
        with self._begin_entry(request, SENT), self._lock:
            eager = request.eager = self._credits.take(request.request_id, rank, length)
            if eager < length:
                self._outgoing[request.request_id] = request
            packet = Packet(PacketType.rts, request.request_id, DTYPE_CODE[tensor.dtype], length)
            self._write_parts(rank, packet, bytes_of(tensor)[:eager].clone(), tag, reliable=True)
        if eager == length:
            request.finish()
        else:
            self._watch(request)
        return request

    def _send_small(self, tensor: torch.Tensor, rank: int, tag: int, *, background: bool) -> None:
        self._refuse_if_over(rank)
        length, dtype_code = tensor.nbytes, DTYPE_CODE[tensor.dtype]
        with self._recorder.begin(SENT, dtype_code, tag, length, rank, background) as entry:
            enclosed = ctypes.string_at(tensor.data_ptr(), length)
            self._write(rank, Packet(PacketType.rts, 0, dtype_code, length, enclosed), tag)
            entry.end(well=True)

    def _new_request(
        self, kind: str, tensor: torch.Tensor, rank: int | None, tag: int, timeout_s: float, done: Done | None
    ) -> P2PRequest:
        return P2PRequest(self._whose + kind, next(self._request_ids), tensor, rank, tag, timeout_s, done)

    def _post_receive(self, request: P2PRequest) -> None:
        self._refuse_if_over()
        with self._begin_entry(request, RECEIVED), self._lock:
            message = next((each for each in self._unexpected if request.matches(each)), None)
            if message is not None:
                self._match(request, message)  # first: an interrupt leaves the message there
                self._unexpected.remove(message)
                return
            self._posted.append(request)
            if request.peer is None:
                self._post_here(request, request.tensor)
        self._watch(request)

    def _begin_entry(self, request: P2PRequest, way: int) -> RecordedMessage:
        dtype_code, background = DTYPE_CODE[request.tensor.dtype], request.done is not None
        length = request.tensor.nbytes
        request.entry = self._recorder.begin(way, dtype_code, request.tag, length, request.peer, background)
        return request.entry

    def _post_here(self, request: P2PRequest, tensor: torch.Tensor) -> None:
        """Make a receive from any source wait in the mailbox as well."""

        def end(transfer: Transfer) -> None:
            with self._lock:
                if request not in self._posted:
                    return
                self._posted.remove(request)
            if transfer.error is not None:
                request.finish(transfer.error)
            else:
                request.finish(source=self._hierarchy.here[transfer.source])

        dtype_code, waiter = DTYPE_CODE[tensor.dtype], SenderWaiter(self._context)
        request.here = self._mailbox.irecv(
            tensor.data_ptr(), tensor.nbytes, dtype_code, None, request.tag, waiter, end, recorded=False
        )

    def _refuse_if_over(self, rank: int | None = None) -> None:
        """Raise if nothing can be begun any more, with a rank."""
        if self._context.is_aborted:
            raise self._context.aborted()
        if rank is not None and rank in self._left:
            raise GroupAbortedError(
                f"{self._whose}{self._hosts.describe(rank)}, to which this rank sends, destroyed the group"
            )

    def _write(self, rank: int, packet: Packet, tag: int = 0) -> None:
        self._peers.add(rank)
        self._link.post_text(rank, Channel.p2p, tag, pack(packet))

    def _write_parts(
        self, rank: int, packet: Packet, payload: torch.Tensor, tag: int = 0, *, reliable: bool = False
    ) -> None:
        """Write a packet whose payload travels in pieces of its own."""
        self._peers.add(rank)
        head = torch.frombuffer(bytearray(pack(packet)), dtype=torch.uint8)
        parts = [(head.data_ptr(), head.numel()), (payload.data_ptr(), payload.numel())]
        self._link.post(rank, Channel.p2p, tag, parts, (head, payload), reliable=reliable)

    # -- waiting

    def _wait(self, request: P2PRequest) -> int:
        try:
            while not (self._receive_for(request) or request.wait(_POLL_SECONDS)):
                self._check_request(request)
        except BaseException as error:
            self._give_up(request, error)
            raise
        if request.error is not None:
            raise request.error
        return request.source

    def _give_up(self, request: P2PRequest, error: BaseException) -> None:
        """Take a message back, unless it goes on in the background when its program is interrupted."""
        if not request.finished and (request.done is None or isinstance(error, DistError)):
            self._withdraw(request, error)

    def _receive_for(self, request: P2PRequest) -> bool:
        """Receive a short message on the calling thread, if no other one does; return whether it has come."""
        if request.is_awaited_here(_SMALL_BYTES):

            def take(source: int, kind: int, tag: int, text: bytes) -> bool:
                return kind == Channel.p2p and self._take_short(request, source, tag, text)

            while self._link.receive_for(take, _POLL_SECONDS) and not request.finished:
                self._check_request(request)
        return request.finished

    def _take_short(self, request: P2PRequest, source: int, tag: int, text: bytes) -> bool:
        """Take a message for a receive if it is the next one for that; return whether it was.

        An interrupted receive takes nothing, or leaves the message there as well.
        """
        if tag != request.tag or source != request.peer:
            return False
        try:
            packet = unpack(text)
        except ValueError:
            return False
        message = UnexpectedMessage(source, packet.request, tag, packet.dtype, packet.length, packet.payload)
        if packet.type != PacketType.rts or packet.request or not message.is_possible(_SMALL_BYTES):
            return False
        with self._lock:
            if request is not next((each for each in self._posted if each.matches(message)), None):
                return False
            self._peers.add(source)
            self._posted.remove(request)
            self._match(request, message)
        return True

    def _watch(self, request: P2PRequest) -> None:
        """Make a thread check a message that no thread may be waiting for."""
        if request.done is not None:
            self._thread.start()
            if request.timeout_s < _LONGEST_PAUSE:
                self._thread.wake()

    def _under_way(self) -> list[P2PRequest]:
        with self._lock:
            return [*self._posted, *self._outgoing.values(), *self._coming.values()]

    def _check_all(self) -> float:
        """Give up what waits in vain; return after how many seconds to look again."""
        requests = self._under_way()
        for request in requests:
            if request.done is not None:
                try:
                    self._check_request(request)
                except DistError as error:
                    self._withdraw(request, error)
        if any(request.gone_since is not None for request in requests):
            return _POLL_SECONDS
        longest = min(_LONGEST_PAUSE, self._hierarchy.detector.interval)
        return min([longest, *(max(_POLL_SECONDS, request.deadline.remaining()) for request in requests)])

    def _check_request(self, request: P2PRequest) -> None:
        """Raise if waiting for a message any longer is in vain."""
        if self._thread.has_ended:
            raise GroupDestroyedError(f"{request}, but the group was destroyed")
        self._wait_policy.check(request)

    def _withdraw(self, request: P2PRequest, error: BaseException) -> None:
        """Take a message back that its caller leaves with an error."""
        aborted = self._context.is_aborted
        with self._lock:
            if request.partner is not None:
                if not (aborted or isinstance(error, DistError)):
                    who = self._hosts.describe(self._hierarchy.rank)
                    self._context.abort(
                        f"{who} left a {request.description} halfway, with {type(error).__name__}: {error}"
                    )
                elif not aborted and request.receives:
                    self._write(request.partner, Packet(PacketType.lost, request.offered))
            elif request in self._posted:
                if request.here is not None and not self._mailbox.retract(request.here):
                    return  # the mailbox has begun with it, and ends it
            elif request.request_id in self._outgoing and not (aborted or request.peer is None):
                self._write(request.peer, Packet(PacketType.withdraw, request.request_id))
            self._fail(request, error)

    def _fail(self, request: P2PRequest, error: BaseException) -> None:
        with self._lock:
            if not request.receives:
                self._release_send(request.request_id)
            elif request.partner is not None:
                self._coming.pop((request.partner, request.offered), None)
            else:
                self._posted = [each for each in self._posted if each is not request]
        request.finish(error)

    def _release_send(self, request_id: int) -> P2PRequest | None:
        """Forget a message that was offered, and return its request."""
        self._credits.release(request_id)
        return self._outgoing.pop(request_id, None)

    def _lose_connection(self, rank: int, why: str) -> None:
        """Send the rest of large messages to a rank again, or note that there will be no other connection."""
        is_last = rank in self._link.lost()
        with self._lock:
            for request in self._under_way():
                if request.partner == rank and is_last:
                    request.note_broken_connection(why)
                elif request.partner == rank and not request.receives:
                    # A copy: if all has come before, the tensor may be freed before this has been sent.
                    self._write_parts(rank, Packet(PacketType.data, request.request_id), request.rest.clone())

    # -- packets

    def _arrived(self, message: Message) -> None:
        """Handle a packet, on the thread of the transport."""
        sender = message.source
        try:
            packet = unpack(bytes(message.text))
        except ValueError as error:
            warnings.warn("%signored an invalid message of rank %d: %s", self._whose, sender, error)
            return
        with self._lock:
            self._peers.add(sender)
            request_id = packet.request
            if packet.type == PacketType.rts:
                if message.lost is not None:
                    raise message.lost
                _, _, dtype, length, enclosed = packet
                payload = message.storages[0] if message.storages else enclosed
                self._announced(UnexpectedMessage(sender, request_id, message.tag, dtype, length, payload))
            elif packet.type == PacketType.data:
                self._take_rest(sender, request_id, message)
            elif packet.type == PacketType.put:
                self._write(sender, Packet(self.exposed.write(message, packet), request_id))
            elif packet.type == PacketType.withdraw:
                unwanted = sender, request_id
                self._unexpected = [each for each in self._unexpected if each[:2] != unwanted]
            elif packet.type == PacketType.bye:
                self._left.add(sender)
            elif packet.type == PacketType.cts:
                self._send_rest(sender, request_id)
            elif (request := self._release_send(request_id)) is not None:
                lost = packet.type == PacketType.lost
                request.finish(self._wait_policy.failure(request, "its end of it broke") if lost else None)

    def _announced(self, message: UnexpectedMessage) -> None:
        if not message.is_possible(_SMALL_BYTES):
            warnings.warn("%signored an invalid message of rank %d", self._whose, message.source)
            return
        for request in tuple(self._posted):
            if request.matches(message) and (request.here is None or self._mailbox.retract(request.here)):
                self._posted.remove(request)
                self._match(request, message)
                return
        self._unexpected.append(message)

    def _match(self, request: P2PRequest, message: UnexpectedMessage) -> None:
        """Give a receive the message that matches it."""
        tensor, source, payload = request.tensor, message.source, message.payload
        if misfit := message.misfit(tensor):
            self._answer(message, PacketType.refuse)
            request.finish(DistBackendError(self._whose + misfit))
            return
        if message.length > _SMALL_BYTES and request.entry is not None:
            request.entry.came(source)
        eager = request.eager = len(payload)
        origin = payload if isinstance(payload, bytes) else payload.data_ptr()
        ctypes.memmove(tensor.data_ptr(), origin, eager)
        if eager == message.length:
            request.finish(source=source)
            self._answer(message, PacketType.ack)
            return
        request.partner, request.offered = source, message.request_id
        self._coming[source, message.request_id] = request
        self._answer(message, PacketType.cts)

    def _answer(self, message: UnexpectedMessage, what: PacketType) -> None:
        if message.request_id:
            self._write(message.source, Packet(what, message.request_id))

    # -- the rest of large messages

    def _send_rest(self, receiver: int, request_id: int) -> None:
        """Send the rest of a message, as its receiver asks for it."""
        request = self._outgoing.get(request_id)
        if request is None:
            self._context.abort(
                f"rank {receiver} asked rank {self._hierarchy.rank} for a message that was taken back"
            )
            return
        request.partner = receiver
        self._write_parts(receiver, Packet(PacketType.data, request_id), request.rest)

    def _take_rest(self, source: int, request_id: int, message: Message) -> None:
        """Take the rest of a message, unless it has come before."""
        if (request := self._coming.pop((source, request_id), None)) is None:
            return
        if why := request.take_rest(message):
            self._write(source, Packet(PacketType.lost, request_id))
            request.finish(self._wait_policy.failure(request, why))
            return
        request.finish(source=source)
        self._write(source, Packet(PacketType.ack, request_id))
