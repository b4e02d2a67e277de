"""How letters get from one rank to another, on another host, each once and in their order.

The first goes by the box in the store (letters.py), which is always there and keeps it for a rank that has
not come to read yet. For more there is a *line*: both tell each other that there shall be one, and open their
ends, a rank that has heard of the other at once. As soon as an end is open its letters go over that.

Letters are numbered, and are read in that order, whichever way they have come. Each confirms those that have
been read; without anything else to write that is written after every few letters. What has gone over the line
is kept until it is confirmed. When the line breaks, and when a rank leaves, what is not confirmed goes by the
box, where it outlives its sender; what has come twice is dropped. So a line that breaks loses nothing, and is
no error: whether the rank at its other end lives is known from elsewhere (failure_detector.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any

from torchestra.engine.multihost.bridge import Bridge, BridgeError
from torchestra.engine.multihost.letters import Envelope, Letter, Postman, What, pack, unpack, warnings
from torchestra.engine.multihost.line import Line
from torchestra.errors import DistError
from torchestra.store import Store

__all__ = ["Correspondence"]

_CONFIRM_EVERY = 8
_GOODBYE_SECONDS = 1.0
_FORMALITIES = (What.line, What.confirm, What.bye)


class _Peer:
    """A rank on another host.

    Attributes:
        sent: how many letters have been written to it.
        read: how many of its letters have been read.
        confirmed: how many of these it has been told of.
        early: its letters by number, of those that others must be read before.
        kept: what has gone over the line and not been confirmed: number, what it says, bytes, what to keep.
        wants_line: it has been told that there shall be one.
        line: this end of it, from when it is made; ``is_open`` says whether letters go over it.
        broken: why it is not there any more.
        has_left: it writes and reads no more.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent = self.read = self.confirmed = 0
        self.early: dict[int, Letter] = {}
        self.kept: deque[tuple[int, int, bytearray, object]] = deque()
        self.wants_line = False
        self.line: Line | None = None
        self.is_open = False
        self.broken = ""
        self.has_left = False

    @property
    def is_owed(self) -> bool:
        """Whether it has not confirmed letters that matter to it, and may still read."""
        return not self.has_left and any(what not in _FORMALITIES for _, what, *_ in self.kept)


class Correspondence:
    """All letters from and to one rank.

    Args:
        store, rank, key, look, failed: see :class:`Postman`.
        others: the ranks on other hosts.
        name: of the threads.
        lock: held while letters are delivered; guards what is here as well.
        open_bridge: makes this rank's end of the bridge to another rank.
        deliver: called with the sender and each letter.
        broke: called with a rank, if the line to it has broken, and why.

    Attributes:
        awaited: whether letters are waited for.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        others: Container[int],
        key: bytes,
        name: str,
        lock: threading.RLock,
        open_bridge: Callable[[int], Bridge],
        deliver: Callable[[int, Letter], None],
        broke: Callable[[int, str], None],
        look: Callable[[], float],
        failed: Callable[[Exception], None],
    ) -> None:
        self._rank, self._name = rank, name
        self._others = others
        self._post = Postman(store, rank, key, name, self._take, look, failed)
        self._changed = threading.Condition(lock)
        self._open_bridge, self._deliver, self._broke, self._failed = open_bridge, deliver, broke, failed
        self._peers: dict[int, _Peer] = {}
        self._closed = False
        self.awaited = False

    def start(self) -> None:
        """Begin to read."""
        self._post.start()

    def hurry(self) -> None:
        """Letters are waited for, until :attr:`awaited` is false."""
        if not self.awaited:
            self.awaited = True
            for peer in tuple(self._peers.values()):
                if peer.line is not None:
                    peer.line.hurry()

    def write(self, rank: int, letter: Letter) -> None:
        """Write a letter to a rank.

        Raises:
            DistStoreError, DistNetworkError: it must go by the store, which cannot be reached.
        """
        with self._changed:
            peer = self._peer(rank)
            if peer.sent and not peer.wants_line:
                self._want_line(peer)
            peer.sent += 1
            raw = pack(Envelope(self._rank, peer.sent, peer.read), letter)
            peer.confirmed = peer.read
            left_over = [raw]
            if peer.is_open:
                assert peer.line is not None
                try:
                    peer.kept.append((peer.sent, letter.what, raw, peer.line.write(raw)))
                    return
                except BridgeError as error:
                    left_over = [*self._give_line_up(peer, error), raw]
        for each in left_over:
            self._post.put(rank, each)

    def is_direct(self, rank: int) -> bool:
        """Whether letters to a rank go over a line."""
        peer = self._peers.get(rank)
        return peer is not None and peer.is_open

    def mark(self) -> threading.Event:
        """See :meth:`Postman.mark`."""
        return self._post.mark()

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it leaves."""
        peer = self._peers.get(rank)
        return peer is not None and peer.has_left

    def line_to(self, rank: int) -> Line:
        """The line to a rank that has written; not necessarily open yet.

        Raises:
            BridgeError: it is broken.
        """
        with self._changed:
            peer = self._peer(rank)
            self._want_line(peer)
            if peer.broken or peer.line is None:
                raise BridgeError(peer.broken or "there is no line")
            return peer.line

    def close(self, in_vain: bool) -> None:
        """Leave, when what was written has been read, or is where it can be.

        Args:
            in_vain: nobody reads any more.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        self.hurry()
        if not in_vain:
            with contextlib.suppress(DistError, OSError):
                self._say_goodbye(peers)
        self._post.close()
        for peer in peers:
            if peer.line is not None:
                peer.line.close()

    def _say_goodbye(self, peers: list[_Peer]) -> None:
        for peer in peers:
            if peer.is_open and not peer.has_left:
                self.write(peer.rank, Letter(What.bye))
        deadline = time.monotonic() + _GOODBYE_SECONDS
        with self._changed:
            for peer in peers:
                while peer.is_open and peer.kept and not peer.has_left:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not self._changed.wait(remaining):
                        break
            left_over = [(peer.rank, raw) for peer in peers if peer.is_owed for raw in self._drop_line(peer)]
        for rank, raw in left_over:
            self._post.put(rank, raw)

    # -- reading

    def _take(self, raw: bytes | memoryview) -> None:
        """A letter has come, by the box or over a line."""
        try:
            envelope, letter = unpack(raw)
            if envelope.sender not in self._others:
                raise ValueError(f"rank {envelope.sender} is on no other host of the group")
        except ValueError as error:
            warnings.warn("rank %d dropped a letter: %s", self._rank, error)
            return
        with self._changed:
            peer = self._peer(envelope.sender)
            while peer.kept and peer.kept[0][0] <= envelope.confirmed:
                peer.kept.popleft()
            if envelope.number > peer.read:
                peer.early[envelope.number] = letter
            try:
                while (following := peer.early.pop(peer.read + 1, None)) is not None:
                    peer.read += 1
                    self._read(peer, following)
                if peer.read - peer.confirmed >= _CONFIRM_EVERY:
                    self.write(peer.rank, Letter(What.confirm))
            except (DistError, OSError) as error:
                if not self._closed:
                    self._failed(error)
            if self._closed:
                self._changed.notify_all()

    def _read(self, peer: _Peer, letter: Letter) -> None:
        if letter.what == What.line:
            self._want_line(peer)
        elif letter.what == What.bye:
            peer.has_left = True
            peer.kept.clear()
            if peer.is_open:
                self.write(peer.rank, Letter(What.confirm))
        elif letter.what != What.confirm and not self._closed:
            self._deliver(peer.rank, letter)

    def _peer(self, rank: int) -> _Peer:
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer(rank)
        return peer

    # -- lines

    def _want_line(self, peer: _Peer) -> None:
        if not peer.wants_line:
            peer.wants_line = True
            self._post.start()
            self.write(peer.rank, Letter(What.line))
        if peer.read and peer.line is None and not (peer.broken or self._closed):
            self._open_line(peer)

    def _open_line(self, peer: _Peer) -> None:
        def opened() -> None:
            with self._changed:
                peer.is_open = not peer.broken

        def broke(error: BridgeError) -> None:
            with self._changed:
                left_over = self._give_line_up(peer, error)
                self._changed.notify_all()
            try:
                for raw in left_over:
                    self._post.put(peer.rank, raw)
            except (DistError, OSError) as failure:
                if not self._closed:
                    self._failed(failure)

        bridge: Any = self._open_bridge(peer.rank)
        peer.line = Line(bridge, f"{self._name}-{peer.rank}", opened, self._take, broke, lambda: self.awaited)

    def _give_line_up(self, peer: _Peer, error: BridgeError) -> list[bytearray]:
        """The line has broken; what was told over it in vain."""
        if peer.broken:
            return []
        peer.broken = str(error)
        left_over = self._drop_line(peer)
        self._broke(peer.rank, peer.broken)
        return left_over

    def _drop_line(self, peer: _Peer) -> list[bytearray]:
        peer.is_open = False
        left_over = [raw for _, _, raw, _ in peer.kept]
        peer.kept.clear()
        return left_over
