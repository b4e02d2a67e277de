"""One rank's context in an arena: the words that its kernels read, and the ends of its waits.

A kernel that has waited for a while returns PENDING, with the rank it waits for in BLOCKED. Then
:meth:`RankContext.finish` checks for failures, in Python: signals have been handled by then, so Ctrl-C works;
a peer that has died or left, an abort by another rank or the deadline end the operation with an error that
names the rank. An operation that was left halfway cannot be undone, so a rank that leaves one aborts the
group: it writes why into the arena's header, and every other rank raises that.

A mismatch is different: the ranks find it when all have arrived and before anything was moved, so all raise
it together and the group stays usable.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine import operations
from torchestra.engine.diagnosis.last_seen import end_last_seen
from torchestra.engine.failure.abort import read_abort_text, write_abort_text
from torchestra.engine.failure.hang_report import HostReport, hang_report, host_report, late_elsewhere
from torchestra.engine.failure.liveness import PeerProcesses, Peers, PeerThreads, own_process
from torchestra.engine.failure.mismatches import (
    call_of,
    differing_thresholds,
    late_mismatch,
    mismatch_text,
    operation_now,
    tell_call,
)
from torchestra.engine.failure.stack_reporter import offer_facts
from torchestra.engine.kernels import shared_words
from torchestra.engine.kernels.placement import REBALANCE_EVERY
from torchestra.engine.kernels.selection import SpinPolicy, cores_in_affinity
from torchestra.engine.membership.arena_registers import ArenaRegisters
from torchestra.engine.membership.lending import publish_token, raise_unreadable
from torchestra.engine.membership.sleep_times import SleepTimes
from torchestra.engine.memory.arena import Arena
from torchestra.engine.memory.heap import Heap, find_heaps
from torchestra.engine.recorder import recorder
from torchestra.engine.recorder.callsites import call_site
from torchestra.engine.recorder.flight_dump import dump_flight_record
from torchestra.engine.recorder.flight_record import waits_for_other_hosts
from torchestra.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    GroupAbortedError,
    GroupDestroyedError,
    LateMismatchError,
    RankFailedError,
    named,
    named_globally,
)
from torchestra.system.deadline import Deadline
from torchestra.system.forking import forget_in_children
from torchestra.system.try_lock import TryLock

_RESTLESS_SECONDS, _CLAIM_SECONDS = 1.0, 4.0


class RankContext:
    """Rank ``rank`` of the group that meets in ``arena``. One operation runs at a time.

    Attributes:
        group_ranks: by rank of the arena, the rank in the group, which messages and errors name. Differs
            where the arena holds only some ranks of a group.
        global_ranks: by rank in the group, the global one, which they name if it is another; empty: none is.
        when_aborted: called with the text that :meth:`abort` wrote, on the rank that wrote it.
        host: where the ranks of the arena are, for messages; empty if the whole group is there.
        ask_elsewhere: returns where the ranks of other hosts stand.
        sleep_times: how long waits sleep before they return PENDING.
        explains_loss: whether the error for a rank that is gone tells where all ranks are. That takes some
            hundredths of a second: for nothing, where a program goes on without it and shows it to nobody.
    """

    def __init__(self, arena: Arena, rank: int, name: str, policy: SpinPolicy) -> None:
        self.arena = arena
        self.rank = rank
        self.size = arena.layout.size
        self.group_ranks: Sequence[int] = range(self.size)
        self.global_ranks: tuple[int, ...] = ()
        self.name = name
        self.registers = ArenaRegisters(arena, rank)
        self.shrinking = TryLock()
        self.when_aborted: Callable[[str, tuple[int, ...], str], None] | None = None
        self.host = ""
        self.ask_elsewhere: Callable[[], list[HostReport]] = list
        self.program = threading.current_thread()
        self.peers: Peers | None = None
        self.closed = self._inherited = False
        self._aborted: GroupAbortedError | None = None
        self._words: npt.NDArray[np.int64] = np.zeros(at.CONTEXT_BYTES // 8, dtype=np.int64)
        self._tables: npt.NDArray[np.int64] = np.zeros((len(at.TABLES), self.size), dtype=np.int64)
        self._masks: npt.NDArray[np.int64] = np.zeros(2 * at.MASK_BYTES // 8, dtype=np.int64)
        self.sleep_times = SleepTimes(policy.poll_interval_s)
        self.explains_loss = True
        self.address: int = self._words.ctypes.data
        self.heap = Heap(arena, rank, partial(find_heaps, arena, self._words))
        layout, base = arena.layout, arena.address
        for offset, value in (
            (at.RANK, rank),
            (at.SIZE, self.size),
            (at.CONTROL, base + layout.control),
            (at.SPLITS, base + layout.splits),
            (at.SLOTS, base + layout.slots),
            (at.SLOT_BYTES, layout.slot_bytes),
            (at.EAGER_SLOTS, base + layout.eager_slots),
            (at.CHUNK_BUFFERS, base + layout.chunk_buffers),
            (at.CHUNK_BUFFER_BYTES, layout.chunk_buffer_bytes),
            (at.ABORT, base + at.HEADER_ABORT),
            (at.SPINS, policy.spins),
            (at.YIELDS, policy.yields),
            *zip((at.SLEEP, at.POLL_INTERVAL), self.sleep_times.addresses, strict=True),
            (at.RECORD, base + arena.record(rank)),
            (at.CLOCK, arena.load_word(at.HEADER_CLOCK)),
            (at.CORES, cores_in_affinity()),
            (at.MASKS, self._masks.ctypes.data),
            (at.NEXT_REBALANCE, REBALANCE_EVERY),
            *((table, self._tables[index].ctypes.data) for index, table in enumerate(at.TABLES)),
        ):
            self._words[offset // 8] = value
        self._control = arena.control(rank)
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child, which is not the rank, write nothing into the arena any more."""
        self.closed = self._inherited = True

    # -- for the engine

    def load_word(self, offset: int) -> int:
        """Return a word of the private context."""
        return int(self._words[offset // 8])

    def store_word(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    def set_table(self, table: int, values: Sequence[int]) -> None:
        """Fill one of the tables by peer (at.SOURCES, …)."""
        self._tables[at.TABLES.index(table), :] = values

    def tables(self) -> npt.NDArray[np.int64]:
        """Return a copy of all tables by peer, for :meth:`set_tables`."""
        return self._tables.copy()

    def set_tables(self, tables: npt.NDArray[np.int64]) -> None:
        """Fill all tables by peer."""
        self._tables[:] = tables

    def finish(
        self,
        code: int,
        kernel: Callable[..., int],
        arguments: tuple[int, ...],
        timeout_s: float,
        site: str | None,
    ) -> None:
        """Complete an operation whose kernel has not returned DONE.

        Args:
            kernel, arguments: to call it again with; a plan and a count come first.
            timeout_s: how long the operation may wait for other ranks, from now on.
            site: the line of the program that called, where it is not on this thread's stack.
        """
        deadline = Deadline(timeout_s)
        meta, count = shared_words.load_acquire(arguments[0] + at.PLAN_META), arguments[1]
        doing = operations.describe(meta, count)
        spins, yields = self.load_word(at.SPINS), self.load_word(at.YIELDS)
        suspect: int | None = None
        try:
            while code == at.PENDING:
                if deadline.elapsed() > _RESTLESS_SECONDS:
                    # After so long a wait a slower wake-up does not matter, and the wait should cost nothing.
                    self.store_word(at.SPINS, 0)
                    self.store_word(at.YIELDS, 0)
                suspect = self.check(doing, self.load_word(at.BLOCKED), deadline, suspect, site=site)
                if suspect is None:
                    self.sleep_times.lengthen()
                else:
                    self.sleep_times.skip()
                code = kernel(*arguments)
        finally:
            self.sleep_times.reset()
            self.store_word(at.SPINS, spins)
            self.store_word(at.YIELDS, yields)
        if code == at.ABORTED:
            raise self.aborted()
        if code == at.UNREADABLE:
            look = partial(self.check, doing, self.load_word(at.BLOCKED), deadline, site=site)
            where = f"{doing} of group {self.name!r} on rank {self.group_rank}"
            raise_unreadable(look, where, self.describe(self.load_word(at.BLOCKED)))
        if code == at.LATE_MISMATCH:
            self.abort(late_mismatch(self, site), mismatch=True)
            raise self.aborted()
        if code == at.MISMATCH:
            self.store_word(at.RESUME, 0)
            self._raise_mismatch(meta, count, site, timeout_s)

    def note_failure(self) -> None:
        """Mark the current operation as failed in the record, if it has not ended."""
        if not self._inherited:
            recorder.fail_entry(self.address)

    def abandon_operation(self, error: BaseException) -> None:
        """Abort the group because this rank has left its current operation with an exception."""
        operation = operation_now(self.arena, self.rank, self.load_word)
        self.abort(f"rank {self.group_rank} left {operation} with {type(error).__name__}: {error}")

    def check(
        self,
        doing: str,
        blocked: int | None,
        deadline: Deadline | None,
        suspect: int | None = None,
        *,
        alone: bool = False,
        site: str | None = None,
    ) -> int | None:
        """Raise if waiting any longer in ``doing`` is in vain.

        A rank that is gone may have done its part before it went. So the first call that finds the rank
        waited for gone, or any that has not arrived, only returns it, for the caller to look once more and
        hand it in as ``suspect``. (Ranks that wait for a rank which waits for the dead one learn of it from
        the abort.)

        Args:
            deadline: of the operation, None for none.
            alone: the operation concerns only ``blocked`` (a message), and nothing of it has happened yet:
                when its time is over the group stays usable.
            site: as for :meth:`finish`.

        Raises:
            GroupAbortedError: another rank has aborted the group, or the rank waited for has left it.
            RankFailedError: the rank waited for has died (any rank, where ``blocked`` is None).
            CollectiveTimeoutError: the deadline has expired.
            GroupDestroyedError: this rank has closed the group meanwhile.
        """
        if self.arena.load_word(at.HEADER_ABORT):
            raise self.aborted()
        if self.closed:
            raise GroupDestroyedError(
                f"rank {self.group_rank} destroyed group {self.name!r} while it was in {doing}"
            )
        dead = self._dead()
        gone = self._gone(blocked, dead, alone)
        explain = partial(self.report, range(self.size), site, ()) if self.explains_loss else None
        if gone is not None:
            if suspect != gone:
                return gone
            if gone in dead:
                died = ", ".join(f"{self.describe(rank)} died ({self.end_reason(rank)})" for rank in dead)
                why = f"{died}; rank {self.group_rank} saw it in {doing}"
                self.abort(why, self.to_group_ranks(dead), explain)
            else:
                self.abort(
                    f"{self.describe(gone)} has destroyed the group, and rank {self.group_rank} waits for"
                    f" it in {doing}: do all ranks call the same operations?",
                    explain=explain,
                )
            raise self.aborted()
        if deadline is not None and deadline.expired():
            if alone:
                raise self._message_timeout(doing, blocked, deadline)
            raise self._timeout(doing, deadline, site)
        return None

    def _message_timeout(self, doing: str, blocked: int | None, deadline: Deadline) -> CollectiveTimeoutError:
        """Return the error of a message whose time is over; the group stays usable."""
        ranks = tuple(range(self.size)) if blocked is None else (blocked,)
        return CollectiveTimeoutError(
            f"{doing} of group {self.name!r} timed out after {deadline.elapsed():.1f} s on rank"
            f" {self.group_rank} (the timeout is {deadline.timeout_s:g} s); the group stays"
            f" usable.{self.report(ranks, None, self.ask_elsewhere())}",
            self.to_group_ranks(ranks),
        )

    def _timeout(self, doing: str, deadline: Deadline, site: str | None) -> DistBackendError:
        """Abort the group, as the time of an operation is over, and return the error."""
        late = [rank for rank in self.missing() if not waits_for_other_hosts(self.arena, rank)]
        if self.host and not late and self._await_abort():
            return self.aborted()  # the rank that waits for other hosts has asked them
        here, elsewhere = self.to_group_ranks(late), self.ask_elsewhere()
        names, missing = late_elsewhere(elsewhere, here)
        if here:
            names, missing = [self.describe(*late), *names], here + missing
        who = f"{', '.join(names)} had not arrived" if names else "all ranks had arrived"
        message = (
            f"{doing} of group {self.name!r} timed out after {deadline.elapsed():.1f} s on rank"
            f" {self.group_rank}: {who} (the timeout is {deadline.timeout_s:g} s)."
        )
        self.abort(message, explain=partial(self.report, range(self.size), site, elsewhere))
        # The same lines on every rank, though several may have come to the end of their time at once.
        return CollectiveTimeoutError(message + read_abort_text(self.arena)["report"], missing)

    @property
    def group_rank(self) -> int:
        """Return this rank's number in the group."""
        return self.group_ranks[self.rank]

    def be_on_host(self, host: str, group_size: int) -> None:
        """Make messages and records say that the group has more ranks, on other hosts."""
        self.host = host
        length = self.arena.set_text(at.HEADER_HOST, at.HEADER_HOST_BYTES, host)
        self.arena.store_word(at.HEADER_HOST_LENGTH, length)
        shared_words.store_ordered(self.arena.address + at.HEADER_GROUP_SIZE, group_size)

    def describe(self, *ranks: int) -> str:
        """Name ranks, and their host where there are several, for messages."""
        where = f" on host {self.host}" if self.host else ""
        return named_globally(self.to_group_ranks(ranks), self.global_ranks) + where

    def to_group_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of some ranks in the group."""
        return tuple(self.group_ranks[rank] for rank in ranks)

    def _dead(self, now: bool = False) -> tuple[int, ...]:
        """Return the ranks that have ended without destroying the group; ``now`` as for Peers.dead."""
        dead = self.peers.dead(now) if self.peers is not None else ()
        return tuple(rank for rank in dead if not self.has_left(rank))

    def gone(self) -> frozenset[int]:
        """Return the ranks that have died or left."""
        return frozenset(self._dead()).union(self._left())

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has destroyed the group."""
        return self.arena.load_word(self.arena.control(rank) + at.STATE) == at.LEFT

    def _left(self) -> list[int]:
        left = at.LEFT
        return [rank for rank, state in enumerate(self.arena.states()) if state == left]

    def _gone(self, blocked: int | None, dead: tuple[int, ...], alone: bool) -> int | None:
        """Return a rank that is gone and that the wait cannot end without, or None."""
        if blocked is None:
            left = self._left()
            return dead[0] if dead else left[0] if len(left) == self.size - 1 else None
        for rank in (blocked,) if alone else (blocked, *self.missing()):
            if rank in dead or self.has_left(rank):
                return rank
        return None

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not arrived in this rank's current operation."""
        progress, now = self.arena.progress, self.load_word(at.SEQUENCE) << at.STEP_BITS
        return tuple(rank for rank in range(self.size) if rank != self.rank and progress(rank) <= now)

    def abort_to_shrink(self) -> None:
        """Make the group unusable because this rank is shrinking it; ranks that have died are named."""
        if self.is_aborted:
            return
        if dead := self._dead(now=True):
            died = self.to_group_ranks(dead)
            self.abort(f"{named(died)} died; rank {self.group_rank} saw it in shrink()", failed=died)
        else:
            self.abort(f"rank {self.group_rank} has called shrink()")

    def abort(
        self,
        why: str,
        failed: tuple[int, ...] = (),
        explain: Callable[[], str] | None = None,
        mismatch: bool = False,
    ) -> None:
        """Make the group unusable for all ranks, unless one of them has done so already.

        Args:
            failed: the ranks that died, if that is why.
            explain: tells where every rank stands. Called only if nobody else has aborted the group.
            mismatch: ranks called different operations.
        """
        if self._inherited:
            return
        claimed = shared_words.compare_exchange(self.arena.address + at.HEADER_ABORT_CLAIM, 0, 1) == 0
        report = ""
        try:
            report = explain() if claimed and explain is not None else ""
        finally:  # after an interrupt, too
            # A second rank here waits no longer for the first, which has died, or takes long to explain.
            if claimed or not self._await_abort():
                self._write_abort(why, failed, report, mismatch)

    def _write_abort(self, why: str, failed: tuple[int, ...], report: str, mismatch: bool) -> None:
        if not (written := write_abort_text(self.arena, why, failed, report, mismatch)):
            if self._await_abort():
                return
            self._aborted = self._error_for(why, failed)  # another rank has died while it wrote
        shared_words.mark_aborted(self.address)
        dump_flight_record(self.arena)
        if written and self.when_aborted is not None:
            self.when_aborted(why, failed, report)

    def _await_abort(self) -> bool:
        """Wait some seconds for a rank that is about to say why it aborts; return whether it has."""
        return any(self.is_aborted for _ in Deadline(_CLAIM_SECONDS).polls(0.001))

    def _error_for(self, why: str, failed: tuple[int, ...], mismatch: bool = False) -> GroupAbortedError:
        message = f"rank {self.group_rank}: group {self.name!r} can no longer be used: {why}"
        if mismatch:
            return LateMismatchError(message)
        return RankFailedError(message, failed) if failed else GroupAbortedError(message)

    def aborted(self) -> GroupAbortedError:
        """Return the error that says why the group was aborted (which it must have been)."""
        if (exclusion := self.registers.exclusion(self.name)) is not None:
            return exclusion
        if self._aborted is None:
            text = read_abort_text(self.arena)
            why = text["why"] + text["report"]
            self._aborted = self._error_for(why, tuple(text["failed"]), text["mismatch"])
        # A new object each time: a traceback must not grow over repeated raises.
        return copy.copy(self._aborted)

    def end_reason(self, rank: int) -> str:
        """Return how a rank that is dead ended, as far as it can be known."""
        return "its process is gone" if self.peers is None else self.peers.end_reason(rank)

    @property
    def is_aborted(self) -> bool:
        return self.arena.load_word(at.HEADER_ABORT) != 0

    def announce(self) -> None:
        """Enter this rank into the arena: its identity, and that it is present."""
        self.arena.hold(self.rank)
        for word, value in zip((at.PROCESS, at.STARTED, at.PID_NAMESPACE), own_process(), strict=True):
            self.arena.store_word(self._control + word, value)
        publish_token(self.arena, self.rank, self._words)
        self.arena.store_word_of_each(at.GROUP_RANK, self.group_ranks)
        shared_words.store_ordered(self.arena.address + self._control + at.STATE, at.PRESENT)

    def meet_peers(self, threads: dict[int, threading.Thread] | None, program: threading.Thread) -> None:
        """Begin to watch the liveness of the peers.

        Args:
            threads: by rank, the threads that are ranks, filled as they join; None where ranks are processes.
        """
        self.program = program
        if threads is not None:
            self.peers = PeerThreads(threads, self.rank)
        elif self.size > 1:
            self.peers = PeerProcesses(self.arena, self.rank)
        offer_facts(self, answers=threads is None and self.size > 1)

    def leave(self) -> None:
        """Announce that this rank has left the group."""
        self.closed = True
        if self._inherited:
            return
        end_last_seen(self)
        shared_words.store_ordered(self.arena.address + self._control + at.STATE, at.LEFT)
        if not self.is_aborted and len({*self._dead(), *self._left()}) == self.size:
            dump_flight_record(self.arena)  # the last to leave
        shared_words.increment_and_wake(self.arena.address + self._control + at.ASKED)  # ends the watcher
        shared_words.wake_all(self.address)
        if self.peers is not None:
            self.peers.close()

    def _raise_mismatch(self, meta: int, count: int, site: str | None, timeout_s: float) -> None:
        """Exchange with the others what each rank called, and raise CollectiveMismatchError."""
        sent, expected = (
            self._tables[at.TABLES.index(table)].tolist() for table in (at.SOURCE_BYTES, at.TARGET_BYTES)
        )
        mine = f"{operations.describe(meta, count)}{operations.describe_lengths(meta, count, sent, expected)}"
        mine += f"{differing_thresholds(self.arena, self.load_word)} at {site or call_site()}"
        tell_call(self.arena, self.rank, mine)
        deadline = Deadline(min(timeout_s, 10))
        for step in (2, 3):
            shared_words.publish_step(self.address, step)
            suspect: int | None = None
            while shared_words.await_step(self.address, step) != at.DONE:
                blocked = self.load_word(at.BLOCKED)
                if self.is_aborted:
                    raise self.aborted()
                if deadline.expired() or blocked == suspect:
                    break
                suspect = self._gone(blocked, self._dead(), alone=True)
            if step == 2:
                others = partial(call_of, self.arena)
                calls = [mine if rank == self.rank else others(rank) for rank in range(self.size)]
        by_rank = dict(zip(self.group_ranks, calls, strict=True))
        text = mismatch_text(self.name, self.load_word(at.SEQUENCE), by_rank, self.global_ranks)
        raise CollectiveMismatchError(f"{text}\nNothing was sent; the group stays usable.")

    def report(self, ranks: Iterable[int], site: str | None, elsewhere: Sequence[HostReport]) -> str:
        """Return a diagnosis and a line for each of the ranks; ``site`` as for :meth:`finish`."""
        return hang_report([*elsewhere, self.host_report(ranks, site)], self.group_rank)

    def host_report(self, ranks: Iterable[int], site: str | None = None) -> HostReport:
        """Return where the ranks of this host stand, with a line for each of ``ranks``."""
        own = site or call_site(otherwise=self.program.ident)
        return host_report(self, range(self.size), frozenset(ranks), self._dead(), own)
