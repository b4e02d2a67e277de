"""How the ranks of a group come to share an arena: through a store, a socket, and a proof by attaching.

Rank 0 makes the arena and says in the store where it is to be had; the others fetch it. Between
processes it is handed over as a descriptor to those that prove themselves (admission.py); between threads of
one process it is simply looked up. That both ends are on one host is not concluded
from names: a rank that cannot fetch the arena is not there. Each rank makes one request to the
store, so joining costs O(ranks) in all.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.admission import Admission, fetch
from torchestra.engine.algorithms import waiting_policy
from torchestra.engine.arena import Arena, layout_for
from torchestra.engine.kernels import move
from torchestra.engine.member import Member
from torchestra.engine.operations import Kind, pack
from torchestra.errors import CollectiveTimeoutError, DistBackendError, DistStoreError
from torchestra.store import Store


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
    seconds: float,
    *,
    threads: bool,
    thread: threading.Thread | None = None,
    numbers: Sequence[int] | None = None,
) -> Member:
    """Enter a group; returns when all ranks have. Must be called by every rank of the group.

    Args:
        store: a store that only the ranks of this group, and only for this purpose, use.
        rank, size: of the group.
        name: of the group, for messages.
        seconds: how long to wait for the others.
        threads: whether the ranks are threads of this process.
        thread: the one that the rank's program runs in; default: the one that calls.
        numbers: what messages call the ranks, where these are only some of a group's; default: their own.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
        DistBackendError: this rank cannot share memory with rank 0.
    """
    deadline = time.monotonic() + seconds
    program = threading.current_thread() if thread is None else thread
    spins, yields = waiting_policy(size)
    called = range(size) if numbers is None else numbers
    if size == 1:
        arena, descriptor = Arena.create(layout_for(1), name)
        os.close(descriptor)
        member = Member(arena, 0, name, spins=spins, yields=yields)
        member.numbers = called
        member.announce()
        return member
    if threads:
        shared = _meet_threads(store, rank, size, name, deadline)
        member = Member(shared.arena, rank, name, spins=spins, yields=yields)
        member.numbers = called
        shared.threads[rank] = program
        member.meet_peers(shared.threads, program)
        member.announce()
        try:
            _first_barrier(member, deadline)
        finally:
            if rank == 0:
                _forget(shared)
    else:
        arena = _meet_processes(store, rank, size, name, deadline)
        member = Member(arena, rank, name, spins=spins, yields=yields)
        member.numbers = called
        member.announce()
        _first_barrier(member, deadline)
        member.meet_peers(None, program)
    return member


def _first_barrier(member: Member, deadline: float) -> None:
    plan = np.array([member.context, pack(Kind.barrier), 0, 0, -1], dtype=np.int64)
    arguments = (plan.ctypes.data, 0)
    try:
        code = move.barrier(*arguments)
        if code != at.DONE:
            seconds = max(0.0, deadline - time.monotonic())
            member.finish(code, move.barrier, arguments, seconds, None)
    except BaseException as error:
        member.leave_halfway(error)
        raise


def _meet_threads(store: Store, rank: int, size: int, name: str, deadline: float) -> _ThreadArena:
    if rank == 0:
        arena, descriptor = Arena.create(layout_for(size), name)
        os.close(descriptor)
        token = secrets.token_hex(16)
        _thread_arenas[token] = shared = _ThreadArena(arena)
        store.set("arena", f"threads {token}")
        return shared
    kind, token = _ask_for_arena(store, rank, size, name, deadline)
    found = _thread_arenas.get(token) if kind == "threads" else None
    if found is None:
        raise DistBackendError(
            f"rank {rank} of group {name!r} is a thread, but rank 0 is not a thread of the same process:"
            " give all ranks the same backend"
        )
    return found


def _forget(shared: _ThreadArena) -> None:
    for token in [token for token, arena in _thread_arenas.items() if arena is shared]:
        del _thread_arenas[token]


def _meet_processes(store: Store, rank: int, size: int, name: str, deadline: float) -> Arena:
    layout = layout_for(size)
    if rank == 0:
        arena, descriptor = Arena.create(layout, name)
        try:
            _hand_out(store, descriptor, size, name, deadline)
        finally:
            os.close(descriptor)
        return arena
    kind, invitation = _ask_for_arena(store, rank, size, name, deadline)
    if kind != "processes":
        raise DistBackendError(
            f"rank {rank} of group {name!r} is a process, but rank 0 is a thread: give all ranks the same"
            f" backend"
        )
    descriptor = fetch(invitation, store.secret, rank, name, deadline)
    try:
        return Arena.attach(descriptor, layout)
    finally:
        os.close(descriptor)


def _ask_for_arena(store: Store, rank: int, size: int, name: str, deadline: float) -> tuple[str, str]:
    seconds = max(0.001, deadline - time.monotonic())
    try:
        (told,) = store.await_values(["arena"], timedelta(seconds=seconds))
    except DistStoreError as error:
        if not isinstance(error, TimeoutError):
            raise
        raise CollectiveTimeoutError(
            f"rank 0 of group {name!r} did not come within {seconds:.1f} s (seen from rank {rank} of {size}):"
            " is it running, and does it use the same rendezvous?",
            (0,),
        ) from error
    kind, token = told.decode().split()
    return kind, token


def _hand_out(store: Store, descriptor: int, size: int, name: str, deadline: float) -> None:
    """Rank 0: give the descriptor to every other rank."""
    started = time.monotonic()
    with Admission(range(1, size), store.secret, name) as admission:
        store.set("arena", f"processes {admission.invitation}")
        while waiting := admission.waited_for:
            if time.monotonic() > deadline:
                missing = tuple(sorted(waiting))
                raise CollectiveTimeoutError(
                    f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of group"
                    f" {name!r} did not"
                    f" come within {time.monotonic() - started:.1f} s (seen from rank 0 of {size}): are they"
                    " running, on this host, and do they use the same rendezvous?",
                    missing,
                )
            admission.serve(descriptor)
