"""What of a mailbox is under way: its private state, and the thread that moves many transfers together.

Whoever holds ``_lock`` works with the private state and the records (matching.py). The gate guards the inbox,
in which calls leave transfers for the thread, and what else says who has to do what; it is held for moments
only, also by who holds the lock, and nobody who holds it waits for the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchestra.engine.channels import matching
from torchestra.engine.channels import words as w
from torchestra.engine.channels.transfer import Record, Transfer, Waiter
from torchestra.engine.channels.wording import Wording
from torchestra.engine.layout import ABORTED, PENDING

_post: Any = matching.post
_run: Any = matching.run
_cancel: Any = matching.cancel
_completed: Any = matching.completed
_call_attention: Any = matching.call_attention

LOOK_SECONDS = 0.05
_RECORDS_AT_ONCE = 64


class Traffic:
    """The transfers of one rank. Args: as :class:`~torchestra.engine.channels.mailbox.Mailbox`."""

    def __init__(
        self,
        context: int,
        area: int,
        rank: int,
        size: int,
        name: str = "",
        kind_name: Callable[[int], str] = "kind {}".format,
    ) -> None:
        assert area % w.PAGE == 0, "the channels must begin at a page"
        self._wording = Wording(rank, name, kind_name)
        self._thread_name = f"torchestra-messages-{name}-{rank}"
        self._words: npt.NDArray[np.int64] = np.zeros((w.PEERS_AT + size * w.PEER_BYTES) // 8, dtype=np.int64)
        self._state: int = self._words.ctypes.data
        for offset, value in (
            (w.CONTEXT, context),
            (w.BELLS, area),
            (w.CHANNELS, area + w.bells_bytes(size)),
            (w.CHANNEL_BYTES, w.channel_bytes(size)),
            (w.RING_BYTES, w.ring_bytes(size)),
            (w.PIECE_BYTES, w.piece_bytes(size)),
            (w.RANK, rank),
            (w.SIZE, size),
        ):
            self._words[offset // 8] = value
        self._lock = threading.Lock()
        self._free: list[Record] = []
        self._own = self._new_record()  # of the call that runs on its caller's thread
        self._gate = threading.Condition()
        self._queueing = False
        self._closed = False
        self._inbox: deque[Transfer] = deque()
        self._pending: dict[int, Transfer] = {}
        self._broken: dict[tuple[bool, int], str] = {}
        self._thread: threading.Thread | None = None
        self._next_look = 0.0

    # -- with the gate

    def _submit(self, transfer: Transfer) -> None:
        """Leave a transfer to the thread."""
        with self._gate:
            if self._closed:
                raise self._wording.destroyed(transfer)
            reason = self._broken.get((transfer.sending, transfer.peer))
            if reason is not None:
                raise self._wording.unusable(transfer, reason)
            self._queueing = True
            self._inbox.append(transfer)
            self._call_thread()

    def _withdraw(self, transfer: Transfer, error: BaseException) -> None:
        """Have the thread drop a transfer that its caller leaves with an error."""
        with self._gate:
            if not self._closed:
                transfer.withdrawn = error
                self._inbox.append(transfer)
                self._call_thread()

    def _call_thread(self) -> None:
        """Have the thread look into the inbox, and whoever is in a kernel make room for it. With the gate."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._thread_name, daemon=True)
            self._thread.start()
        self._gate.notify()
        _call_attention(self._state)

    # -- with the lock

    def _new_record(self) -> Record:
        if not self._free:
            slab = np.zeros((_RECORDS_AT_ONCE, w.RECORD_BYTES // 8), dtype=np.int64)
            self._free.extend(Record(words) for words in slab)
        return self._free.pop()

    def _post(self, transfer: Transfer, record: Record) -> int:
        """Queue a transfer; what it has come to, noted in the transfer unless that is PENDING."""
        code: int = _post(
            self._state,
            record.address,
            int(transfer.sending),
            transfer.address,
            transfer.length,
            transfer.kind,
            transfer.peer,
            transfer.tag,
        )
        if code == w.NO_MEMORY:
            _cancel(self._state, record.address)
            transfer.error = self._wording.no_memory(transfer)
        elif code != PENDING:
            self._note(transfer, record)
        return code

    def _admit(self, transfer: Transfer, record: Record) -> None:
        """Let a record that is posted be notified when it is finished."""
        record.words[w.NOTIFY // 8] = 1
        transfer.record = record
        self._pending[record.address] = transfer

    def _note(self, transfer: Transfer, record: Record) -> None:
        """Note what a finished record has come to."""
        if record.word(w.STAGE) == w.MISMATCHED:
            transfer.error = self._wording.mismatch(transfer, record)
        elif not transfer.sending:
            transfer.source = record.word(w.FROM)

    def _drop(self, transfer: Transfer, error: BaseException) -> None:
        """Fail a transfer that is not finished."""
        record = transfer.record
        stage = w.QUEUED
        if record is not None:
            stage = _cancel(self._state, record.address)
            del self._pending[record.address]
            self._free.append(record)
            transfer.record = None
        if stage == w.RUNNING and record is not None:
            self._break(record, error, transfer.waiter)
        transfer.finish(error)

    def _break(self, record: Record, error: BaseException, waiter: Waiter) -> None:
        """Give up a channel in which a message was left halfway, and what waits for it."""
        sending = record.word(w.SENDING) == 1
        peer = record.word(w.PEER if sending else w.FROM)
        reason = self._wording.left(sending, peer, error)
        with self._gate:
            self._broken[sending, peer] = reason
            self._queueing = True
        waiter.abort(reason)
        for transfer in tuple(self._pending.values()):
            if (transfer.sending, transfer.peer) == (sending, peer):
                self._drop(transfer, self._wording.unusable(transfer, reason))

    # -- the thread

    def _serve(self) -> None:
        while True:
            with self._gate:
                while not (self._inbox or self._pending or self._closed):
                    self._gate.wait()
            with self._lock:
                try:
                    self._work()
                except BaseException as error:
                    self._drop_all(error)
                    raise
            if self._closed:
                return

    def _work(self) -> None:
        """Move all transfers together, until there is none left or the mailbox is closed."""
        while True:
            with self._gate:
                arrived = tuple(self._inbox)
                self._inbox.clear()
                self._words[w.ATTENTION // 8] = 0
                if not (arrived or self._pending or self._closed):
                    self._queueing = bool(self._broken)
                    return
            for transfer in arrived:
                self._take_up(transfer)
            if self._closed:
                self._drop_all(None)
                return
            if not self._pending:
                continue
            code = _run(self._state, 0)
            while address := _completed(self._state):
                self._complete(self._pending.pop(address))
            if code == w.NO_MEMORY:
                self._drop_receives()
            self._look(at_once=code == ABORTED)

    def _take_up(self, transfer: Transfer) -> None:
        """Post a transfer from the inbox, or take it back."""
        if transfer.finished:
            return
        if transfer.withdrawn is not None:
            self._drop(transfer, transfer.withdrawn)
            return
        reason = self._broken.get((transfer.sending, transfer.peer))
        if reason is not None:
            transfer.finish(self._wording.unusable(transfer, reason))
            return
        record = self._new_record()
        if self._post(transfer, record) == PENDING:
            self._admit(transfer, record)
        else:
            self._free.append(record)
            transfer.finish()

    def _complete(self, transfer: Transfer) -> None:
        record = transfer.record
        assert record is not None
        self._note(transfer, record)
        transfer.record = None
        self._free.append(record)
        transfer.finish()

    def _look(self, at_once: bool) -> None:
        """Let the waiters of asynchronous transfers look, some 20 times a second (less if they are many)."""
        began = time.monotonic()
        if began < self._next_look and not at_once:
            return
        for transfer in tuple(self._pending.values()):
            if transfer.ended is None and transfer.record is not None:
                try:
                    transfer.check()
                except Exception as error:
                    self._drop(transfer, error)
        if at_once and self._pending:
            time.sleep(LOOK_SECONDS / 10)  # blocking calls, whose callers are about to look themselves
        spent = time.monotonic() - began
        self._next_look = began + max(0.9 * LOOK_SECONDS, 20 * spent)

    def _drop_receives(self) -> None:
        for transfer in tuple(self._pending.values()):
            record = transfer.record
            if record is not None and not transfer.sending and record.word(w.STAGE) == w.QUEUED:
                self._drop(transfer, self._wording.no_memory(transfer))

    def _drop_all(self, error: BaseException | None) -> None:
        """Fail everything with an error (None: that the mailbox is closed)."""
        with self._gate:
            transfers = (*self._pending.values(), *self._inbox)
            self._inbox.clear()
        for transfer in transfers:
            if not transfer.finished:
                record = transfer.record
                if record is not None:
                    _cancel(self._state, record.address)
                    del self._pending[record.address]
                transfer.finish(self._wording.destroyed(transfer) if error is None else error)
