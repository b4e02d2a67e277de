"""A rank's mailbox: blocking calls on the caller's thread, everything else on one thread per mailbox.

A call finds the lock free and nothing under way, nearly always: then it runs a kernel right there, to
the end. Otherwise it leaves a :class:`Transfer` in the inbox, and the mailbox's thread (started when
first needed) moves all of those together, in the order of the calls. A blocking call that is in its kernel
when another thread of this rank wants something too is interrupted and becomes a Transfer as well. What keeps
the order is ``_queueing``: while it is set, every call goes through the inbox. It is set with the first
Transfer and taken back by the thread when nothing is left.

A wait looks at signals, the deadline and the peers through its waiter, some 20 times a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torchestra.engine.channels import matching
from torchestra.engine.channels import words as w
from torchestra.engine.channels.traffic import LOOK_SECONDS, Traffic
from torchestra.engine.channels.transfer import Record, Transfer, Waiter
from torchestra.engine.layout import DONE, MISMATCH, PENDING

_transfer: Any = matching.transfer
_run: Any = matching.run
_cancel: Any = matching.cancel
_call_attention: Any = matching.call_attention
_discard: Any = matching.discard

_CLOSE_SECONDS = 10.0


class Mailbox(Traffic):
    """What rank ``rank`` of a group of ``size`` sends and receives messages with.

    Addresses are of contiguous memory, lengths in bytes; ``kind`` is a small number (a dtype's) that must be
    the same on both sides, as the length must. ``tag`` is any 64-bit integer. Messages with one tag from one
    rank to another arrive in the order of the calls. Every thread may call.

    A send to the own rank never waits: what no receive waits for is copied.

    Args:
        context: address of the rank's kernel context (layout.py).
        area: address, here, of the group's ``channel_area_bytes(size)`` bytes of channels.
        rank, size: the place of this rank in the group.
        name: of the group, for messages.
        kind_name: what to call a ``kind`` in messages.
    """

    def send(self, address: int, nbytes: int, kind: int, destination: int, tag: int, waiter: Waiter) -> None:
        """Send a message; return when the memory may be used again (which is before it is received).

        Raises:
            GroupAbortedError: an earlier message to that rank was left halfway.
            GroupDestroyedError: the mailbox is closed, or was while this call waited.
            BaseException: what the waiter raised. If a part of the message had been sent by then, the waiter
                was told to abort the group; otherwise nothing was.
        """
        if not self._lock.acquire(False):
            self._queue(Transfer(True, address, nbytes, kind, destination, tag, waiter))
            return
        own = self._own
        transfer = None
        try:
            if not self._queueing:
                code = _transfer(self._state, own.address, 1, address, nbytes, kind, destination, tag)
                if code == DONE:
                    return
                transfer = Transfer(True, address, nbytes, kind, destination, tag, waiter)
                if self._go_on(code, transfer):
                    return
        except BaseException as error:
            self._give_up(own, error, waiter)
            raise
        finally:
            self._lock.release()
        if transfer is None:
            self._queue(Transfer(True, address, nbytes, kind, destination, tag, waiter))
        else:
            self._wait(transfer)

    def recv(self, address: int, nbytes: int, kind: int, source: int | None, tag: int, waiter: Waiter) -> int:
        """Receive the oldest message with the tag from a rank, or from any (None); the rank that sent it.

        Raises:
            DistBackendError: the message has another length or kind than expected; it was thrown away.
            GroupAbortedError: an earlier message from that rank was left halfway.
            GroupDestroyedError: the mailbox is closed, or was while this call waited.
            BaseException: what the waiter raised. If a part of the message had been received by then, the
                waiter was told to abort the group; otherwise everything stays as it was.
        """
        peer = -1 if source is None else source
        if not self._lock.acquire(False):
            return self._queue(Transfer(False, address, nbytes, kind, peer, tag, waiter))
        own = self._own
        transfer = None
        try:
            if not self._queueing:
                code = _transfer(self._state, own.address, 0, address, nbytes, kind, peer, tag)
                if code == DONE:
                    return peer if peer >= 0 else own.word(w.FROM)
                transfer = Transfer(False, address, nbytes, kind, peer, tag, waiter)
                if self._go_on(code, transfer):
                    return own.word(w.FROM)
        except BaseException as error:
            self._give_up(own, error, waiter)
            raise
        finally:
            self._lock.release()
        if transfer is None:
            return self._queue(Transfer(False, address, nbytes, kind, peer, tag, waiter))
        return self._wait(transfer)

    def isend(
        self,
        address: int,
        nbytes: int,
        kind: int,
        destination: int,
        tag: int,
        waiter: Waiter,
        done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Begin to send a message; the memory must stay as it is until the transfer is finished.

        Args:
            done: called once with the transfer when it is finished, well or not: on the mailbox's thread, or
                on this one before ``isend`` returns. It must not raise, nor wait for a transfer.

        Raises:
            GroupAbortedError, GroupDestroyedError: as :meth:`send`. What fails later is told by ``error``.
        """
        return self._begin(Transfer(True, address, nbytes, kind, destination, tag, waiter, done))

    def irecv(
        self,
        address: int,
        nbytes: int,
        kind: int,
        source: int | None,
        tag: int,
        waiter: Waiter,
        done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Begin to receive a message; the memory must not be touched until the transfer is finished.

        Receives get messages in the order in which they were called for, blocking ones included. For the rest
        see :meth:`isend` and :meth:`recv`.
        """
        peer = -1 if source is None else source
        return self._begin(Transfer(False, address, nbytes, kind, peer, tag, waiter, done))

    @property
    def stored_bytes(self) -> int:
        """How many bytes of messages lie in the store, received before a receive for them was called."""
        return int(self._words[w.STORED // 8])

    def close(self) -> None:
        """Stop the thread; whatever is under way fails with GroupDestroyedError. May be called twice."""
        with self._gate:
            if self._closed:
                return
            self._closed = self._queueing = True
            _call_attention(self._state)
            self._gate.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            try:
                _discard(self._state)
            finally:
                self._lock.release()

    # -- on the caller's thread

    def _go_on(self, code: int, transfer: Transfer) -> bool:
        """Bring a blocking call to its end that did not end at once; False: the thread shall do that."""
        own = self._own
        while code != DONE:
            if code == MISMATCH:
                raise self._wording.mismatch(transfer, own)
            if code == w.NO_MEMORY:
                raise self._wording.no_memory(transfer)
            if code == w.INTERRUPTED:
                with self._gate:
                    if self._closed:
                        raise self._wording.destroyed(transfer)
                    if self._inbox:
                        transfer.ended = threading.Event()
                        self._hand_over(transfer)
                        return False
                    self._words[w.ATTENTION // 8] = 0
            else:
                transfer.check()
            code = _run(self._state, own.address)
        return True

    def _hand_over(self, transfer: Transfer) -> None:
        """Let the thread go on with the transfer in the own record. With the lock and the gate."""
        self._admit(transfer, self._own)
        self._own = self._new_record()
        self._queueing = True
        self._call_thread()

    def _give_up(self, own: Record, error: BaseException, waiter: Waiter) -> None:
        """Take back what a call has posted in a record that it leaves with an error. With the lock."""
        stage = _cancel(self._state, own.address)
        if self._pending.pop(own.address, None) is not None:
            self._free.append(own)
        if stage == w.RUNNING:
            self._break(own, error, waiter)

    def _begin(self, transfer: Transfer) -> Transfer:
        """Try a transfer at once, or leave it to the thread."""
        code = None
        if self._lock.acquire(False):
            own = self._own
            try:
                if not self._queueing:
                    code = self._post(transfer, own)
                    if code == PENDING:
                        with self._gate:
                            self._hand_over(transfer)
            except BaseException as error:
                self._give_up(own, error, transfer.waiter)
                raise
            finally:
                self._lock.release()
        if code is None:
            self._submit(transfer)
        elif code != PENDING:
            transfer.finish()
        return transfer

    def _queue(self, transfer: Transfer) -> int:
        transfer.ended = threading.Event()
        self._submit(transfer)
        return self._wait(transfer)

    def _wait(self, transfer: Transfer) -> int:
        """Wait, as the caller of a blocking call, for the thread to finish it."""
        assert threading.current_thread() is not self._thread, "done() must not wait for a transfer"
        ended = transfer.ended
        assert ended is not None
        try:
            while not ended.wait(LOOK_SECONDS):
                transfer.check()
        except BaseException as error:
            self._withdraw(transfer, error)
            ended.wait(_CLOSE_SECONDS)
            raise
        if transfer.error is not None:
            raise transfer.error
        return transfer.source
