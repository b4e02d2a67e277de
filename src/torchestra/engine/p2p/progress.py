"""Move the messages of a mailbox: whichever thread waits for one does, or else the mailbox's own.

Calls leave transfers in ``_inbox``, in their order. Whoever then occupies the state (BUSY, see kernels.py)
works for all: posts what is in the inbox, runs the kernel that moves all transfers together, and tells what
is finished. A thread that waits for a transfer works so on its own account, which spares two changes
of thread; the mailbox's thread (started when first needed) works when for GRACE nobody has, and looks after
transfers that nobody waits for. Who leaves something for one that works calls its attention, and it comes
back from the kernel; when somebody else wants to work, the mailbox's thread leaves it to them.

BUSY guards the private state, the records and ``_pending``. ``_lock`` guards QUEUEING, ``_closed``,
``_broken`` and what is put into the inbox; it is held for moments only, also by who works, and nobody
who holds it waits for BUSY. QUEUEING is set while there is any transfer, or the mailbox is closed or a
channel broken: a blocking call that finds it unset may do without all this.

A signal handler may raise anywhere in the main thread. So BUSY is taken with a token that is known before,
and given back in a ``finally`` whether or not it was taken, by a builtin function: before a Python function
does anything, a handler may raise in it. Steps are made such that they can be repeated, and who works next
after an exception repeats them (:meth:`Transfers._repair`).
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from torchestra.engine.kernels import shared_words
from torchestra.engine.layout import ABORTED, DONE
from torchestra.engine.native.kernel import entry_point
from torchestra.engine.p2p import immediate, kernels
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p.error_texts import MailboxErrors
from torchestra.engine.p2p.transfer import RankName, ReceiveCancelled, Record, Transfer, Waiter
from torchestra.system.limits import start_thread

_post: Any = kernels.post
_run: Any = kernels.run
_cancel: Any = kernels.cancel
_forget: Any = kernels.forget
_try_acquire: Any = kernels.try_acquire
_call_attention: Any = kernels.call_attention
_store_ordered: Any = shared_words.store_ordered

POLL_SECONDS = 0.05
CLOSE_SECONDS = 10.0
_GRACE_SECONDS = 0.001
_LINGER_SECONDS = 0.05
_RECORDS_AT_ONCE = 64
_MAX_SPINS = 100  # some 3 µs


class Transfers:
    """The transfers of one rank. Args: as :class:`~torchestra.engine.p2p.mailbox.Mailbox`."""

    def __init__(
        self,
        context: int,
        area: int,
        rank: int,
        size: int,
        name: str = "",
        kind_name: Callable[[int], str] = "kind {}".format,
        rank_name: RankName = "rank {}".format,
        *,
        peers_are_threads: bool = False,
    ) -> None:
        assert area % w.PAGE == 0, "the channels must begin at a page"
        self._errors = MailboxErrors(rank, name, kind_name, rank_name)
        self._rank_name = rank_name
        self._words = w.new_private_state(context, area, rank, size)
        self._state: int = self._words.ctypes.data
        self._words[w.MAX_SPINS // 8] = 0 if peers_are_threads else _MAX_SPINS
        self._transfer = entry_point(kernels.transfer)
        self._release = entry_point(kernels.release)
        self._send_now = entry_point(immediate.send_now)
        self._receive_now = entry_point(immediate.receive_now)
        self._tokens = itertools.count(-1, -1)
        self._own = Record(self._words[w.OWN_RECORD // 8 : (w.OWN_RECORD + w.RECORD_BYTES) // 8])
        self._free: list[Record] = []
        # By the address of the record. Who goes through them takes a copy, which is one step; a tuple of the
        # values is not.
        self._pending: dict[int, Transfer] = {}
        self._finished: deque[Transfer] = deque()  # whose done() is still to be called
        self._interrupted = False
        self._lock = threading.RLock()
        self._closed = False
        self._inherited = False
        self._claimed = False
        self._inbox: deque[Transfer] = deque()
        self._broken: dict[tuple[bool, int], str] = {}
        # In the context of the rank that makes it, so that callbacks know which rank they are of.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._serve,),
            name=f"torchestra-messages-{name}-{rank}",
            daemon=True,
        )
        self._started = False
        self._resting = True
        self._doorbell = threading.Lock()
        self._doorbell.acquire()

    def forget(self) -> None:
        """Move nothing, and refuse calls, in a forked child, whose parent's these messages are.

        Nothing is told of what was under way: it goes on in the parent.
        """
        self._closed = self._inherited = True
        self._store(w.QUEUEING, 1)  # nothing goes at once any more
        self._lock = threading.RLock()  # a thread that does not exist here may have had it
        self._inbox.clear()
        self._pending.clear()
        self._transfer = self._refuse

    def _refuse(self, *_: object) -> int:
        raise self._errors.inherited()

    # -- whoever works

    def _submit(self, transfer: Transfer) -> None:
        """Put a transfer into the inbox, and post it if nobody is at work."""
        try:
            with self._lock:
                if self._inherited:
                    self._refuse()
                if self._closed:
                    raise self._errors.destroyed(transfer)
                reason = self._broken.get((transfer.sending, transfer.peer))
                if reason is not None:
                    raise self._errors.unusable(transfer, reason)
                self._store(w.QUEUEING, 1)
                self._inbox.append(transfer)
            self._have_posted()
        except BaseException as error:
            transfer.done = None
            self._withdraw(transfer, error)
            raise

    def _withdraw(self, transfer: Transfer, error: BaseException) -> None:
        """Give up a transfer, if it is under way, that its caller leaves with an error; return when it is."""
        if transfer.finished or (transfer.record is None and transfer not in self._inbox):
            return
        with self._lock:
            transfer.withdrawn = error
            self._inbox.append(transfer)
        self._have_posted()
        transfer.sleep(CLOSE_SECONDS)

    def retract(self, transfer: Transfer) -> bool:
        """Take back a receive, unless a message for it has begun to come; whether it was taken back.

        Its ``done`` is not called then.
        """
        done, transfer.done = transfer.done, None
        with self._lock:
            transfer.retracting = True
            self._inbox.append(transfer)
        self._have_posted()
        while transfer.retracting and not transfer.finished:
            transfer.sleep(_GRACE_SECONDS)
        if transfer.finished and isinstance(transfer.error, ReceiveCancelled):
            return True
        transfer.done = done
        if transfer.finished:
            transfer.tell()
        return False

    def _have_posted(self) -> None:
        """Have the inbox looked into: by this thread, or by the one that is at work."""
        token = next(self._tokens)
        try:
            posted = _try_acquire(self._state, token)
            if posted:
                self._post_all()
        finally:
            self._release(self._state, token)
        if posted:
            self._tell()
            self._wake_thread()
        else:
            self._call_attention()

    def _try_to_work(self, eager: bool) -> int:
        """:meth:`_work`, or OCCUPIED."""
        token = next(self._tokens)
        try:
            code = self._work(eager) if _try_acquire(self._state, token) else w.OCCUPIED
        finally:
            self._release(self._state, token)
        self._tell()
        return code

    def _store(self, offset: int, value: int) -> None:
        """Write a word that kernels of other threads read meanwhile: before all that is done next."""
        _store_ordered(self._state + offset, value)

    def _call_attention(self) -> None:
        with self._lock:
            if not self._closed:
                _call_attention(self._state)

    def _tell(self) -> None:
        """Call what wants to be called about finished transfers."""
        while self._finished:
            try:
                transfer = self._finished.popleft()
            except IndexError:  # another thread was quicker
                break
            transfer.tell()

    def _spare_record(self) -> Record:
        try:
            return self._free.pop()
        except IndexError:
            slab = np.zeros((_RECORDS_AT_ONCE, w.RECORD_BYTES // 8), dtype=np.int64)
            first, *others = (Record(words) for words in slab)
            self._free.extend(others)
            return first

    def _give_back(self, record: Record) -> None:
        if record is not self._own:
            self._free.append(record)

    def _wake_thread(self) -> None:
        """Leave what is still under way to the thread."""
        if self._resting and (self._pending or self._inbox):
            with self._lock:
                if not (self._started or self._closed):
                    start_thread(self._thread)
                    self._started = True
            self._ring()

    def _ring(self) -> None:
        try:
            self._doorbell.release()
        except RuntimeError:  # it has been rung already
            pass

    # -- who occupies the state

    def _work(self, eager: bool) -> int:
        """Move all transfers until one is finished, or the kernel wants Python to look; what it returned."""
        self._post_all()
        if not self._pending:
            return DONE
        try:
            code: int = _run(self._state, 0, int(eager))
            self._collect()
            if code == w.NO_MEMORY:
                self._drop_receives()
        except BaseException:
            self._interrupted = True
            raise
        self._lower_flag()
        return code

    def _post_all(self) -> None:
        """Post what is in the inbox, in its order."""
        try:
            if self._interrupted:
                self._repair()
            self._store(w.ATTENTION, 0)
            while self._inbox:
                self._take_up(self._inbox[0])
                self._inbox.popleft()
            if self._closed:
                self._drop_all()
            self._collect()
        except BaseException:
            self._interrupted = True
            raise
        self._lower_flag()

    def _take_up(self, transfer: Transfer) -> None:
        """Post one transfer, or take it back."""
        if transfer.finished:
            return
        if transfer.withdrawn is not None:
            self._drop(transfer, transfer.withdrawn)
            return
        if transfer.retracting and transfer.record is not None:
            if transfer.record.load_word(w.STAGE) == w.QUEUED:
                self._drop(transfer, ReceiveCancelled())
            transfer.retracting = False
            return
        reason = self._broken.get((transfer.sending, transfer.peer))
        if reason is not None:
            self._finish(transfer, self._errors.unusable(transfer, reason))
            return
        record = transfer.record
        if record is None:
            record = self._spare_record()
            record.store_word(w.STAGE, w.UNUSED)
            transfer.record = record
        if record.load_word(w.STAGE) == w.UNUSED:
            self._pending[record.address] = transfer
            code = _post(
                self._state,
                record.address,
                int(transfer.sending),
                transfer.address,
                transfer.length,
                transfer.kind,
                transfer.peer,
                transfer.tag,
                1 if transfer.recorded else w.UNRECORDED,
            )
            if code == w.NO_MEMORY:
                self._drop(transfer, self._errors.no_memory(transfer))

    def _adopt(self, transfer: Transfer, record: Record) -> None:
        """Make a transfer of a blocking call that was begun without one."""
        with self._lock:
            self._store(w.QUEUEING, 1)
        transfer.record = record
        self._pending[record.address] = transfer
        record.store_word(w.NOTIFY, 1)

    def _collect(self) -> None:
        """Finish the transfers whose records are in COMPLETED."""
        while address := int(self._words[w.COMPLETED // 8]):
            transfer = self._pending.get(address)
            if transfer is not None and transfer.record is not None:
                self._finish(transfer, self._result(transfer, transfer.record))
            _forget(self._state, address)
            if transfer is not None:
                self._retire(transfer)  # not before: whoever takes the record has it to himself

    def _result(self, transfer: Transfer, record: Record) -> BaseException | None:
        """Return what a finished record has come to."""
        if record.load_word(w.STAGE) == w.MISMATCHED:
            return self._errors.mismatch(transfer, record)
        if not transfer.sending:
            transfer.source = record.load_word(w.FROM)
        return None

    def _finish(self, transfer: Transfer, error: BaseException | None) -> None:
        transfer.finish(error)
        if transfer.done is not None:
            self._finished.append(transfer)

    def _retire(self, transfer: Transfer) -> None:
        record, transfer.record = transfer.record, None
        if record is not None and self._pending.pop(record.address, None) is not None:
            self._give_back(record)

    def _drop(self, transfer: Transfer, error: BaseException) -> None:
        """Fail a transfer that is not finished."""
        self._collect()  # a record that is in COMPLETED must not be used again, and its transfer is finished
        if transfer.finished:
            return
        record = transfer.record
        transfer.withdrawn = error
        if record is not None and _cancel(self._state, record.address) == w.RUNNING:
            self._break(record, error, transfer.waiter)
        self._finish(transfer, error)
        self._retire(transfer)

    def _break(self, record: Record, error: BaseException, waiter: Waiter) -> None:
        """Give up a channel in which a message was left halfway, and what waits for it."""
        sending = record.load_word(w.SENDING) == 1
        peer = record.load_word(w.PEER if sending else w.FROM)
        reason = self._errors.left(sending, peer, error)
        with self._lock:
            self._broken[sending, peer] = reason
            self._store(w.QUEUEING, 1)
        waiter.abort(reason)
        for transfer in self._pending.copy().values():
            if (transfer.sending, transfer.peer) == (sending, peer) and transfer.record is not record:
                self._drop(transfer, self._errors.unusable(transfer, reason))

    def _drop_receives(self) -> None:
        for transfer in self._pending.copy().values():
            record = transfer.record
            if record is not None and not transfer.sending and record.load_word(w.STAGE) == w.QUEUED:
                self._drop(transfer, self._errors.no_memory(transfer))

    def _drop_all(self) -> None:
        """Fail everything, because the mailbox is closed."""
        for transfer in self._pending.copy().values():
            transfer.withdrawn = self._errors.destroyed(transfer)
            if transfer.record is not None:
                _cancel(self._state, transfer.record.address)
            self._finish(transfer, transfer.withdrawn)
            self._retire(transfer)

    def _repair(self) -> None:
        """Bring to an end what an exception has interrupted."""
        self._collect()
        for transfer in self._pending.copy().values():
            record = transfer.record
            if transfer.finished:
                self._retire(transfer)
            elif record is not None and record.load_word(w.STAGE) == w.FINISHED:
                self._finish(transfer, transfer.withdrawn)
                self._retire(transfer)
        self._interrupted = False

    def _lower_flag(self) -> None:
        if self._pending or self._inbox:
            return
        with self._lock:
            if not self._inbox:
                self._store(w.QUEUEING, int(self._closed or bool(self._broken)))

    # -- the thread

    def _serve(self) -> None:
        used = next_check = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if not (self._pending or self._inbox):
                if now - used > _LINGER_SECONDS:
                    self._rest(None)
                else:
                    time.sleep(_GRACE_SECONDS)
                continue
            used = now
            # Somebody may be about to wait for it, and then does the work.
            time.sleep(_GRACE_SECONDS)
            code = DONE
            while (self._pending or self._inbox) and time.monotonic() < next_check and code != ABORTED:
                code = self._try_to_work(eager=False)
                if code == w.OCCUPIED:
                    self._rest(POLL_SECONDS)
                    break
                if self._claimed:
                    self._claimed = False
                    break
            if code == ABORTED or time.monotonic() >= next_check:
                next_check = self._check_transfers()

    def _rest(self, seconds: float | None) -> None:
        """Sleep until roused, or for so long (None: without end, if there is nothing to do)."""
        self._resting = True
        if not self._closed and (seconds is not None or not (self._pending or self._inbox)):
            self._doorbell.acquire(timeout=-1 if seconds is None else seconds)
        self._resting = False

    def _check_transfers(self) -> float:
        """Let the waiters of transfers that nobody waits for check; when to do so next."""
        began = time.monotonic()
        for transfer in self._pending.copy().values():
            if not (transfer.watched or transfer.finished):
                try:
                    transfer.check(self._rank_name)
                except Exception as error:
                    self._withdraw(transfer, error)
        # Less than a twentieth of the time, however many there are.
        return began + max(POLL_SECONDS, 20 * (time.monotonic() - began))
