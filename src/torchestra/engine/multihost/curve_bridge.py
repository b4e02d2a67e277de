"""The bridge over the group's transport, ZeroMQ with CURVE: the default.

Every peer has proved the job's secret before a byte of its data is read, and all traffic is encrypted
(transport/). The ends meet through the rail's store, on a thread of their own; operations begun before that
are sent then. From one end to another there is one stream of messages, and receives take them in order: a
message that comes before its receive is kept. They are numbered: where a connection breaks and another is
made, what was on its way is lost, and the next message must not be taken for it.

The failure detector knows whether the other hosts live (failure_detector.py). An end that is closed says
goodbye; if a connection ends without that, the bridge gives up what is under way after the heartbeat bound,
within which a link that was cut may come back.

A message of up to 64 KB is one frame. A longer one goes in pieces (transport/framing.py), so each piece is
on its way while the next one is encrypted. Callers pass large tensors in chunks, several of which are under
way at once; so while one is added up others travel.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch

from torchestra.engine.multihost.bridge import Bridge, BridgeError, PeerTensors
from torchestra.engine.multihost.group_transport import Channel, GroupTransport
from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.store import PrefixStore, Store
from torchestra.store.secret import SECRET_ADVICE
from torchestra.system.limits import start_thread
from torchestra.transport.message import Message
from torchestra.transport.rendezvous import meet

_ONE_FRAME_BYTES = 64 << 10
_CLOSED = "this end is closed"


class _Transfer:
    """See Pending.

    Attributes:
        left: by end, how many of its messages have not been sent or received yet. The lock of the bridge
            guards it.
    """

    def __init__(self, receives: PeerTensors, sends: PeerTensors) -> None:
        self.left = Counter(end for end, _ in (*receives, *sends))
        self._error = ""
        self._under_way = threading.Lock()
        if self.left:
            self._under_way.acquire()

    def finish_one(self, end: int) -> bool:
        """Note that a message has been sent or received; return whether it was the last."""
        self.left[end] -= 1
        if self.left[end] == 0:
            del self.left[end]
        if self.left or self._error:
            return False
        self._under_way.release()
        return True

    def fail(self, why: str) -> None:
        if self.left and not self._error:
            self._error = why
            self._under_way.release()

    def wait(self, timeout_s: float) -> bool:
        if not self._under_way.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._under_way.release()
        if self._error:
            raise BridgeError(self._error)
        return True

    def awaited(self) -> Sequence[int]:
        return tuple(self.left)


class CurveBridge(Bridge):
    """See Bridge.

    Args:
        store: one that only the ends of this rail, and only for this purpose, use; it knows the job's secret.
        ranks: the ends, by host.
        names: the names of the ends, for messages.
        timeout_s: how long to look for the others.

    Raises:
        InvalidArgumentError: there is no secret.
    """

    kind = "curve"

    def __init__(
        self,
        store: Store,
        transport: GroupTransport,
        ranks: Sequence[int],
        names: Sequence[str],
        timeout_s: float,
    ) -> None:
        super().__init__(ranks.index(transport.rank), len(ranks))
        secret = store.secret
        if secret is None:
            raise InvalidArgumentError(
                f"{names[self.host]} and the ranks on other hosts have no secret to authenticate each"
                f" other with; {SECRET_ADVICE}"
            )
        self._link, self._rank = transport.link, transport.rank
        self._ranks, self._names = ranks, names
        self._ends = {rank: end for end, rank in enumerate(ranks)}
        # A finaliser may interrupt the thread that holds it, and close the bridge.
        self._lock = threading.RLock()
        self._awaited: defaultdict[int, deque[tuple[_Transfer, torch.Tensor]]] = defaultdict(deque)
        self._come: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._under_way: set[_Transfer] = set()
        self._queued: list[tuple[int, torch.Tensor, _Transfer]] = []
        self._gone: dict[int, str] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._is_open = False
        self._error = ""
        transport.listen(Channel.bridge, self._arrived, self._lost, heartbeat_bound())
        start_thread(
            threading.Thread(
                target=self._open,
                args=(PrefixStore("curve", store.clone()), secret, timeout_s),
                name="torchestra-curve-opening",
                daemon=True,
            )
        )

    def _open(self, store: PrefixStore, secret: bytes, timeout_s: float) -> None:
        """Meet the other ends, and send what is queued."""
        error = ""
        others = {self._ranks[end]: self._names[end] for end in self.others}
        try:
            meet(self._link, store, secret, self._rank, self._ranks, others, timeout_s)
        except (DistError, OSError) as failure:
            error = str(failure)
        with self._lock:
            self._error, self._is_open = self._error or error, not error
            if error:
                self._fail_all(error)
            else:
                for queued in self._queued:
                    self._send(*queued)
            self._queued.clear()

    def _fail_all(self, why: str) -> None:
        for transfer in tuple(self._under_way):
            transfer.fail(why)
        self._under_way.clear()

    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> _Transfer:
        transfer = _Transfer(receives, sends)
        with self._lock:
            if self._error:
                raise BridgeError(self._error)
            if transfer.left:
                self._under_way.add(transfer)
            for end, tensor in sends:
                if self._is_open:
                    self._send(end, tensor, transfer)
                else:
                    self._queued.append((end, tensor, transfer))
            for end, tensor in receives:
                if self._come[end]:
                    self._take(end, self._come[end].popleft(), transfer, tensor)
                elif end in self._gone:
                    transfer.fail(self._gone[end])
                else:
                    self._awaited[end].append((transfer, tensor))
        return transfer

    def _send(self, end: int, tensor: torch.Tensor, transfer: _Transfer) -> None:
        if end in self._gone:
            transfer.fail(self._gone[end])
            return

        def done() -> None:
            with self._lock:
                self._finish_one(transfer, end)

        memory = (tensor.data_ptr(), tensor.numel())
        parts = [memory] if tensor.numel() <= _ONE_FRAME_BYTES else [(0, 0), memory]
        self._link.post(self._ranks[end], Channel.bridge, self._sent[end], parts, tensor, done)
        self._sent[end] += 1

    def _finish_one(self, transfer: _Transfer, end: int) -> None:
        if transfer.finish_one(end):
            self._under_way.discard(transfer)

    def _arrived(self, message: Message) -> None:
        """Take a message, on the thread of the transport."""
        end = self._ends.get(message.source)
        if end is None:
            return
        with self._lock:
            if end in self._gone:
                return
            if message.tag != self._received[end]:
                self._lost(message.source, "has sent something that was lost (its connection has ended)")
                return
            self._received[end] += 1
            if not self._awaited[end]:
                self._come[end].append(message)
                return
            transfer, tensor = self._awaited[end].popleft()
            self._take(end, message, transfer, tensor)

    def _take(self, end: int, message: Message, transfer: _Transfer, tensor: torch.Tensor) -> None:
        """Put what has arrived where it belongs; a peer may have sent anything."""
        address, room = tensor.data_ptr(), tensor.numel()
        length = len(message.text) + sum(storage.nbytes() for storage in message.storages)
        if message.lost is not None or not 0 < length <= room:
            got = f"expected at most {room} bytes from {self._names[end]}, got {length}"
            transfer.fail(got if message.lost is None else str(message.lost))
            self._under_way.discard(transfer)
            return
        ctypes.memmove(address, bytes(message.text), len(message.text))
        address += len(message.text)
        for storage in message.storages:
            ctypes.memmove(address, storage.data_ptr(), storage.nbytes())
            address += storage.nbytes()
        self._finish_one(transfer, end)

    def _lost(self, rank: int, how: str) -> None:
        """On the thread of the transport, note that a rank sends no more, or that a message is missing."""
        end = self._ends.get(rank)
        if end is None:
            return
        why = f"{self._names[end]} {how}"
        with self._lock:
            self._gone.setdefault(end, why)
            for transfer in tuple(self._under_way):
                if end in transfer.left:
                    transfer.fail(why)
                    self._under_way.discard(transfer)
            self._awaited[end].clear()

    def close(self) -> None:
        with self._lock:
            self._error = self._error or _CLOSED
            self._fail_all(self._error)
            self._awaited.clear()
            self._queued.clear()
