"""A rank's mailbox: what the engine sends and receives messages with.

A blocking call finds nothing under way, nearly always: then it runs one kernel, to the end, on its thread; a
short message needs no record for that (immediate.py).
Otherwise, and for asynchronous calls, there is a :class:`Transfer`, and progress.py.

A wait looks at signals, the deadline and the peers through its waiter, some 20 times a second.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torchestra.engine.layout import ABORTED, DONE, MISMATCH
from torchestra.engine.p2p import kernels
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.progress import CLOSE_SECONDS, POLL_SECONDS, Transfers
from torchestra.engine.p2p.transfer import RankName, Record, Transfer, Waiter

_run: Any = kernels.run
_cancel: Any = kernels.cancel
_try_acquire: Any = kernels.try_acquire
_call_attention: Any = kernels.call_attention
_discard: Any = kernels.discard

# A wait that finds the mailbox's thread at work asks it to leave off, and looks so often, after so long each.
_CLAIMS = 5
_CLAIM_SECONDS = 0.0002


def weak_rank_name(method: RankName) -> RankName:
    """Return what a method calls a rank, without keeping its object.

    A mailbox and the thread that serves it refer to each other, so it keeps all else until a collection.
    """
    reference = weakref.WeakMethod(method)

    def rank_name(rank: int) -> str:
        described = reference()
        return f"rank {rank}" if described is None else described(rank)

    return rank_name


class Mailbox(Transfers):
    """Send and receive the messages of rank ``rank`` of a group of ``size``.

    Addresses are of contiguous memory, lengths in bytes; ``kind`` is a small number (a dtype's) that must be
    the same on both sides, as the length must. ``tag`` is any 64-bit integer. Messages with one tag from one
    rank to another arrive in the order of the calls. Every thread may call.

    A send to the own rank never waits: what no receive waits for is copied.

    Args:
        context: address of the rank's kernel context (layout.py).
        area: address, here, of the group's ``channel_area_bytes(size)`` bytes of channels.
        rank, size: the place of this rank in the group.
        name: of the group, for messages.
        kind_name, rank_name: what to call a ``kind``, and a rank, in messages.
        peers_are_threads: whether another rank may be a thread of this process, and need the interpreter.
    """

    def send(self, address: int, nbytes: int, kind: int, destination: int, tag: int, waiter: Waiter) -> None:
        """Send a message; return when the memory may be used again (which is before it is received).

        Raises:
            GroupAbortedError: an earlier message to that rank was left halfway.
            GroupDestroyedError: the mailbox is closed, or was while this call waited.
            BaseException: what the waiter raised. If a part of the message had been sent by then, the waiter
                was told to abort the group; otherwise nothing was.
        """
        code = self._send_now(self._state, address, nbytes, kind, destination, tag)
        if code != DONE:
            self.finish_send(code, address, nbytes, kind, destination, tag, waiter)

    def finish_send(
        self, code: int, address: int, nbytes: int, kind: int, destination: int, tag: int, waiter: Waiter
    ) -> None:
        """Do what is left of :meth:`send` after a kernel has returned ``code``.

        Either nothing was done (OCCUPIED), or the message was sent (QUEUED_MEANWHILE), or this rank's own
        record is in BUSY, and the transfer may be underway.
        """
        self._finish_call(code, True, address, nbytes, kind, destination, tag, waiter)

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
        code = self._receive_now(self._state, address, nbytes, kind, peer, tag)
        return peer if code == DONE else self.finish_recv(code, address, nbytes, kind, peer, tag, waiter)

    def finish_recv(
        self, code: int, address: int, nbytes: int, kind: int, peer: int, tag: int, waiter: Waiter
    ) -> int:
        """Do what is left of :meth:`recv` as :meth:`finish_send` does; any source is -1."""
        return self._finish_call(code, False, address, nbytes, kind, peer, tag, waiter)

    def abandon_operation(self, error: BaseException, waiter: Waiter) -> None:
        """Give up a call that a kernel has handed to Python, and that was left with an error before."""
        self._give_up(self._own, None, error, waiter)

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
            done: called once with the transfer when it is finished, well or not: before ``isend`` returns, or
                later on any thread that waits for a transfer, or on the mailbox's. It must not raise.

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
        *,
        recorded: bool = True,
    ) -> Transfer:
        """Begin to receive a message; the memory must not be touched until the transfer is finished.

        Receives get messages in the order in which they were called for, blocking ones included. For the rest
        see :meth:`isend` and :meth:`recv`.

        Args:
            recorded: whether it shall be in the flight record, which it need not if the caller records it.
        """
        peer = -1 if source is None else source
        transfer = Transfer(False, address, nbytes, kind, peer, tag, waiter, done)
        transfer.recorded = recorded
        return self._begin(transfer)

    def wait(self, transfer: Transfer) -> int:
        """Wait for a transfer of this mailbox; of a receive, the rank that sent.

        A thread that waits here works for the mailbox meanwhile, so a message is there sooner than if one
        waits for ``done`` to be called.

        Raises:
            BaseException: the transfer's ``error`` (what its waiter raised among it), or what a signal
                handler raised; the transfer goes on then.
        """
        if self._inherited:
            self._refuse()
        return self._wait(transfer)

    @property
    def address(self) -> int:
        """The address of its state, for entries; it lies there as long as this object lives."""
        return self._state

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of unexpected messages, received before a receive for them was called."""
        return int(self._words[w.STORED // 8])

    def check(self) -> None:
        """Have every transfer that nobody waits for see now whether its waiter would give it up."""
        if self._inherited:
            return
        self._have_posted()
        self._check_transfers()

    def close(self) -> None:
        """Stop the thread; whatever is under way fails with GroupDestroyedError. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._store(w.QUEUEING, 1)
            _call_attention(self._state)
        self._ring()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        token = next(self._tokens)
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            while not (occupied := _try_acquire(self._state, token)) and time.monotonic() < deadline:
                time.sleep(0.001)
            if occupied:
                self._post_all()
                _discard(self._state)
        finally:
            self._release(self._state, token)
        self._tell()

    def _finish_call(
        self,
        code: int,
        sending: bool,
        address: int,
        nbytes: int,
        kind: int,
        peer: int,
        tag: int,
        waiter: Waiter,
    ) -> int:
        """Bring a blocking call to its end for which a kernel has returned ``code``; the rank that sent."""
        if code == w.QUEUED_MEANWHILE:
            self._have_posted()
            return peer
        own = self._spare_record() if code == w.OCCUPIED else self._own
        transfer = None
        try:
            if code == w.OCCUPIED:
                code = self._transfer(
                    self._state, own.address, int(sending), address, nbytes, kind, peer, tag
                )
            else:
                self._words[w.HANDED_OVER // 8] = 0
            if code not in (DONE, w.QUEUED_MEANWHILE):
                transfer = Transfer(sending, address, nbytes, kind, peer, tag, waiter)
                return self._continue_call(code, transfer, own)
            found = own.load_word(w.FROM) if peer < 0 else peer
            self._give_back(own)
            if code == w.QUEUED_MEANWHILE or self._inbox:
                self._have_posted()
            return found
        except BaseException as error:
            self._give_up(own, transfer, error, waiter)
            raise

    def _continue_call(self, code: int, transfer: Transfer, own: Record) -> int:
        """Bring a blocking call to its end that did not end at once; the rank that sent."""
        if code == w.OCCUPIED:
            self._submit(transfer)
            source = self._wait(transfer)
            self._give_back(own)
            return source
        while code != DONE:
            if code == MISMATCH:
                raise self._errors.mismatch(transfer, own)
            if code == w.NO_MEMORY:
                raise self._errors.no_memory(transfer)
            if code == w.INTERRUPTED:
                self._store(w.ATTENTION, 0)
                if self._closed:
                    raise self._errors.destroyed(transfer)
                if self._inbox:
                    self._adopt(transfer, own)
                    self._release(self._state, own.address)
                    return self._wait(transfer)
            else:
                transfer.check(self._rank_name)
            code = _run(self._state, own.address, 1)
        source = own.load_word(w.FROM)
        self._release(self._state, own.address)
        self._give_back(own)
        if self._inbox:
            self._have_posted()
        return source

    def _give_up(self, own: Record, transfer: Transfer | None, error: BaseException, waiter: Waiter) -> None:
        """Take back what a blocking call has posted that is left with an error."""
        if int(self._words[w.BUSY // 8]) == own.address:
            try:
                self._words[w.HANDED_OVER // 8] = 0
                stage = _cancel(self._state, own.address)
                self._pending.pop(own.address, None)
                if stage == w.RUNNING:
                    self._break(own, error, waiter)
            finally:
                self._release(self._state, own.address)
        elif transfer is not None:
            self._withdraw(transfer, error)
        if self._inbox:
            self._have_posted()

    def _begin(self, transfer: Transfer) -> Transfer:
        self._submit(transfer)
        return transfer

    def _wait(self, transfer: Transfer) -> int:
        """Wait for a transfer, at work if nobody else is; the rank that sent."""
        transfer.watched = True
        next_check = time.monotonic() + POLL_SECONDS
        claims = _CLAIMS
        try:
            while not transfer.finished:
                code = self._try_to_work(eager=True)
                if code == w.OCCUPIED:
                    if claims == _CLAIMS:
                        self._claimed = True
                        self._call_attention()
                    transfer.sleep(_CLAIM_SECONDS if claims > 0 else POLL_SECONDS)
                    claims -= 1
                if not transfer.finished and (code == ABORTED or time.monotonic() >= next_check):
                    self._check(transfer)
                    next_check = time.monotonic() + POLL_SECONDS
        finally:
            transfer.watched = False
            self._wake_thread()
        if transfer.error is not None:
            raise transfer.error
        return transfer.source

    def _check(self, transfer: Transfer) -> None:
        try:
            transfer.check(self._rank_name)
        except Exception as error:
            self._withdraw(transfer, error)
            raise
