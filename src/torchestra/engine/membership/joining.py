"""Make the ranks of a group share an arena: through a store, a socket, and a proof by attaching.

Rank 0 makes the arena and says in the store how to get it; the others fetch it. Rank 0 gives the descriptor
to processes that prove themselves (fd_passing.py); threads of its own process look the arena up. Names do not
decide which ranks share a host: a rank that cannot fetch the arena is on another one. Each rank makes one
request to the store, so joining costs O(ranks) in all.

No rank waits for one that will not come. A process that has the descriptor takes its place in the arena, with
a lock by which the others see that it lives (liveness.py), before it ends its connection to rank 0: if the
connection ends before that, the process has died. And a rank that fails says why, at whichever step: rank 0
under the key that the others read first, the others under one that rank 0 looks at while it waits. Rank 0
then aborts the group in the arena, where the ranks wait that have come. The keys::

    arena      "processes INVITATION", "threads TOKEN", or "failed RANKS WHY", of ranks that died
    failed     "RANK WHY" of the first rank that has failed, "- WHY" of one that is not in the group
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.kernels import move
from torchestra.engine.kernels.selection import spin_policy
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.memory.fd_passing import DescriptorServer, request_descriptor
from torchestra.engine.operations import Kind, pack
from torchestra.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    RankFailedError,
    named,
)
from torchestra.store import Store
from torchestra.system.deadline import Deadline
from torchestra.system.limits import check_free_descriptors, naming_limits

_LIVENESS_SECONDS = 0.05
_POLL_SECONDS = 0.5  # how often rank 0 looks whether another rank has said that it has failed
_DESCRIPTORS = 8  # what a rank needs briefly to enter a group, with some to spare
_LATE = " did not come within "  # in what rank 0 says of ranks that are late


class _ThreadArena:
    """An arena whose ranks are threads of this process, and the threads that have joined."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.threads: dict[int, threading.Thread] = {}


_thread_arenas: dict[str, _ThreadArena] = {}


def join(
    store: Store,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    *,
    threads: bool,
    thread: threading.Thread | None = None,
    group_ranks: Sequence[int] | None = None,
    has_died: Callable[[int], bool] | None = None,
) -> RankContext:
    """Enter a group; returns when all ranks have. Must be called by every rank of the group.

    Args:
        store: a store that only the ranks of this group, and only for this purpose, use.
        rank, size, name: of the group.
        timeout_s: how long to wait for the others.
        threads: whether the ranks are threads of this process.
        thread: the one that runs the rank's program; default: the calling one.
        group_ranks: the numbers of the ranks in the group, where these are only some of its ranks.
        has_died: returns whether a rank, alive before, has died on its way here.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        RankFailedError, GroupAbortedError: another rank has died, or cannot enter the group; says why.
        DistBackendError: this rank cannot enter it.
    """
    deadline = Deadline(timeout_s)
    program = threading.current_thread() if thread is None else thread
    enter = _ArenaEntry(rank, size, name, range(size) if group_ranks is None else group_ranks, program)
    enter.has_died = has_died
    if size == 1:
        with naming_limits(f"group {name!r} cannot be made"):
            return enter.take_rank(_new_arena(1, name))
    failures = _FailureReports(store, rank, name)
    try:
        with naming_limits(f"rank {rank} cannot enter group {name!r}"):
            if threads:
                _join_threads(store, enter, deadline, failures)
            else:
                check_free_descriptors(_DESCRIPTORS)
                _join_processes(store, enter, deadline, failures)
        assert enter.context is not None
        if enter.context.peers is not None:
            enter.context.peers.dead()  # once now, while all live, to know later how one of them ended
    except BaseException as error:
        failures.tell(error)
        if enter.context is not None:
            if not enter.context.is_aborted:
                enter.context.abort(_why(rank, error))
            enter.context.leave()
        raise
    return enter.context


def refuse(store: Store, why: str) -> None:
    """Tell the ranks that enter the group of this store, or will, that it cannot be made.

    For callers outside of the group. It has no effect once all ranks have come.
    """
    # Rank 0 looks at the first while it waits; if it comes later, its invitation replaces the second.
    store.compare_set("failed", "", f"- {why}")
    store.compare_set("arena", "", f"failed - {why}")


class _ArenaEntry:
    """Enter an arena as one rank."""

    def __init__(
        self, rank: int, size: int, name: str, group_ranks: Sequence[int], program: threading.Thread
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._group_ranks, self._program = group_ranks, program
        self.has_died: Callable[[int], bool] | None = None
        self.context: RankContext | None = None

    def check_leader(self) -> None:
        """Raise RankFailedError if rank 0 has died."""
        if self.has_died is not None and self.has_died(0):
            own, leader = self._group_ranks[self.rank], self._group_ranks[0]
            why = f"rank {leader} died before all ranks of the group had come"
            raise RankFailedError(f"rank {own}: group {self.name!r} cannot be used: {why}", (leader,))

    def take_rank(self, arena: Arena, threads: dict[int, threading.Thread] | None = None) -> RankContext:
        """Take the rank in the arena, which the other ranks see."""
        context = RankContext(arena, self.rank, self.name, spin_policy(self.size))
        context.group_ranks = self._group_ranks
        if threads is not None:
            threads[self.rank] = self._program
        context.announce()
        try:
            context.meet_peers(threads, self._program)
        except BaseException:
            context.leave()
            raise
        self.context = context
        return context


class _FailureReports:
    """The reports, in the store, of ranks that cannot enter the group."""

    def __init__(self, store: Store, rank: int, name: str) -> None:
        self._store, self._rank, self._name = store, rank, name
        self._next_check = time.monotonic() + _POLL_SECONDS

    def tell(self, error: BaseException) -> None:
        """Say that this rank has failed; never raises."""
        # A rank that has heard it from others, or has waited in vain for them, has no news for them.
        is_known = isinstance(error, (GroupAbortedError, CollectiveTimeoutError))
        why = str(error) if is_known else _why(self._rank, error)
        with contextlib.suppress(DistError, OSError):
            if self._rank == 0:
                died = error.ranks if isinstance(error, RankFailedError) else ()
                self._store.set("arena", f"failed {','.join(map(str, died)) or '-'} {why}")
            elif not is_known:
                self._store.compare_set("failed", "", f"{self._rank} {why}")

    def check(self, context: RankContext, *, now: bool = False) -> None:
        """On rank 0, called now and then: abort the group if another rank has said that it has failed.

        Raises:
            GroupAbortedError: one has.
        """
        if self._rank != 0 or not (now or time.monotonic() >= self._next_check):
            return
        self._next_check = time.monotonic() + _POLL_SECONDS
        if self._store.check(["failed"]):
            _, _, why = self._store.get("failed").decode(errors="replace").partition(" ")
            context.abort(why)
            raise context.aborted()


def _absent(context: RankContext) -> tuple[int, ...]:
    """Return the ranks that have never been in the arena."""
    arena = context.arena
    return tuple(
        rank for rank in range(context.size) if arena.load_word(arena.control(rank) + at.STATE) == at.ABSENT
    )


def _why(rank: int, error: BaseException) -> str:
    return f"rank {rank} could not enter it: {type(error).__name__}: {error}"


def _new_arena(size: int, name: str) -> Arena:
    arena, descriptor = Arena.create(layout_for(size), name)
    os.close(descriptor)
    return arena


def _first_barrier(context: RankContext, deadline: Deadline, look: Callable[[], None] | None = None) -> None:
    """Return when all ranks are in the arena; ``look`` is called now and then, and may raise."""
    plan = np.array([context.address, pack(Kind.barrier), 0, 0, -1], dtype=np.int64)

    def barrier(*arguments: int) -> int:
        if look is not None:
            look()
        return int(move.barrier(*arguments))

    arguments = (plan.ctypes.data, 0)
    try:
        code = move.barrier(*arguments)
        if code != at.DONE:
            context.finish(code, barrier, arguments, deadline.remaining(), None)
    except GroupAbortedError as error:
        if _LATE in str(error) and not isinstance(error, RankFailedError):
            raise CollectiveTimeoutError(str(error), context.to_group_ranks(_absent(context))) from error
        raise
    except BaseException as error:
        context.abandon_operation(error)
        raise


def _join_threads(store: Store, enter: _ArenaEntry, deadline: Deadline, failures: _FailureReports) -> None:
    """Make the arena, or look it up, and meet the others in the first barrier; in a thread that is a rank."""
    rank, name = enter.rank, enter.name
    token = secrets.token_hex(16) if rank == 0 else ""
    try:
        if rank == 0:
            _thread_arenas[token] = _ThreadArena(_new_arena(enter.size, name))
            store.set("arena", f"threads {token}")
            shared = _thread_arenas[token]
        else:
            backend, their_token = _ask_for_arena(store, rank, enter.size, name, deadline)
            if backend != "threads" or their_token not in _thread_arenas:
                raise DistBackendError(
                    f"rank {rank} of group {name!r} is a thread, but rank 0 is not a thread of the same"
                    " process: give all ranks the same backend"
                )
            shared = _thread_arenas[their_token]
        context = enter.take_rank(shared.arena, shared.threads)
        _first_barrier(context, deadline, partial(failures.check, context))
    finally:
        _thread_arenas.pop(token, None)


def _join_processes(store: Store, enter: _ArenaEntry, deadline: Deadline, failures: _FailureReports) -> None:
    """Make the arena, or fetch it, and meet the others in the first barrier; in a process that is a rank."""
    if enter.rank == 0:
        _lead(store, enter.take_rank(_new_arena(enter.size, enter.name)), deadline, failures, enter.has_died)
    else:
        _first_barrier(_follow(store, enter, deadline, failures), deadline)


def _follow(store: Store, enter: _ArenaEntry, deadline: Deadline, failures: _FailureReports) -> RankContext:
    """Fetch the arena, and take this rank's place in it, in a process that is not rank 0."""
    rank, name = enter.rank, enter.name
    backend, invitation = _await_arena(
        store, rank, enter.size, name, deadline, _POLL_SECONDS, enter.check_leader
    )
    if backend != "processes":
        raise DistBackendError(
            f"rank {rank} of group {name!r} is a process, but rank 0 is a thread: give all ranks the same"
            " backend"
        )
    try:
        descriptor, connection = request_descriptor(invitation, store.secret, rank, name, deadline)
    except DistBackendError as error:
        if isinstance(error.__cause__, OSError):
            _ask_for_arena(store, rank, enter.size, name, deadline)  # where rank 0 says why, if it could
            enter.check_leader()
        raise
    with connection:
        try:
            try:
                arena = Arena.attach(descriptor, layout_for(enter.size))
            finally:
                os.close(descriptor)
            return enter.take_rank(arena)
        except BaseException as error:
            failures.tell(error)  # before rank 0 sees the connection end
            raise


def _ask_for_arena(store: Store, rank: int, size: int, name: str, deadline: Deadline) -> tuple[str, str]:
    return _await_arena(store, rank, size, name, deadline, deadline.remaining())


def _await_arena(
    store: Store,
    rank: int,
    size: int,
    name: str,
    deadline: Deadline,
    interval: float,
    check: Callable[[], None] | None = None,
) -> tuple[str, str]:
    """Return rank 0's word in the store; call ``check``, which may raise, after each interval.

    What ``check`` raises does not count if rank 0 has said why it ended, which it does before it ends.
    """
    while True:
        timeout_s = max(0.001, min(interval, deadline.remaining()))
        try:
            (text,) = store.await_values(["arena"], timedelta(seconds=timeout_s))
            break
        except DistStoreError as error:
            if not isinstance(error, TimeoutError):
                raise
            try:
                if check is not None:
                    check()
            except RankFailedError:
                if store.check(["arena"]):
                    continue
                raise
            if check is None or deadline.expired():
                raise CollectiveTimeoutError(
                    f"rank 0 of group {name!r} did not come within {deadline.timeout_s:.1f} s (seen from rank"
                    f" {rank} of {size}): is it running, and does it use the same rendezvous?",
                    (0,),
                ) from error
    backend, _, token = text.decode(errors="replace").partition(" ")
    if backend == "failed":
        died, _, why = token.partition(" ")
        message = f"rank {rank}: group {name!r} cannot be used: {why}"
        if died == "-":
            raise GroupAbortedError(message)
        raise RankFailedError(message, tuple(map(int, died.split(","))))
    return backend, token


def _lead(
    store: Store,
    context: RankContext,
    deadline: Deadline,
    failures: _FailureReports,
    has_died: Callable[[int], bool] | None,
) -> None:
    """Rank 0: give the descriptor to every other rank, and meet them in the first barrier."""
    name, size = context.name, context.size
    with DescriptorServer(range(1, size), store.secret, name, keeps=True) as admission:
        store.set("arena", f"processes {admission.invitation}")
        look = partial(_check_others, admission, context, failures, has_died)
        next_check = time.monotonic() + _LIVENESS_SECONDS
        try:
            while waiting := admission.waited_for:
                if deadline.expired():
                    missing = context.to_group_ranks(sorted(waiting))
                    message = (
                        f"{named(missing)} of group {name!r} did not come within {deadline.timeout_s:.1f} s"
                        f" (seen from rank 0 of {size}): are they running, on this host, and do they use the"
                        " same rendezvous?"
                    )
                    context.abort(message)
                    raise CollectiveTimeoutError(message, missing)
                admission.serve(context.arena.descriptor)
                if (now := time.monotonic()) >= next_check:
                    look()
                    next_check = now + _LIVENESS_SECONDS
            _first_barrier(context, deadline, look)
        except BaseException as error:
            failures.tell(error)  # before later ranks find no server here
            raise


def _check_others(
    admission: DescriptorServer,
    context: RankContext,
    failures: _FailureReports,
    has_died: Callable[[int], bool] | None,
) -> None:
    """Abort the group if a rank has died on its way into it, or cannot enter it."""
    ended = set(admission.ended())
    if has_died is not None:
        ended.update(filter(has_died, admission.waited_for))
    lost = ended.intersection(_absent(context))  # in this order: ranks that have entered may end both
    failures.check(context, now=bool(lost))
    if died := lost.union(context.peers.dead() if context.peers is not None else ()):
        names = ", ".join(map(context.describe, sorted(died)))
        context.abort(
            f"{names} died before all ranks of the group had come", context.to_group_ranks(sorted(died))
        )
        raise context.aborted()
