"""Put the simulated seams into the product's modules, and take them out again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import pkgutil
import queue
import secrets
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import zmq

from torchestra import (
    autograd,
    engine,
    launcher,
    process_group,
    rendezvous,
    rpc,
    store,
    system,
    transport,
    world,
)
from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.kernels.selection import SpinPolicy
from torchestra.engine.membership import joining, rank_context, shrinking
from torchestra.engine.membership.arena_registers import ArenaRegisters
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.multihost import hierarchy
from torchestra.engine.multihost.curve_bridge import _Transfer
from torchestra.engine.multihost.record_publisher import RecordPublisher
from torchestra.engine.recorder import callsites
from torchestra.rpc import calls, departing, router, starting, termination
from torchestra.store.replicated.sessions import SessionPool
from torchestra.store.tcp.connection import Connection
from torchestra.store.tcp.peer import Peer
from torchestra.system.deadline import Deadline
from torchestra.system.thread_frames import current_frames
from torchestra.transport import event_loop, pair, sockets, source_port
from torchestra.transport.pair import PairConnection
from verification.simulation.endpoints import endpoint_in_shared_memory
from verification.simulation.polling import SimulatedSelect, SimulatedSelectors
from verification.simulation.scheduler import Task, active
from verification.simulation.sockets import SimulatedOS, SimulatedSockets
from verification.simulation.threads import (
    SeededSecrets,
    SimulatedQueues,
    SimulatedThreading,
    SimulatedTime,
)
from verification.simulation.zeromq import (
    SimulatedInbox,
    SimulatedListener,
    SimulatedZeroMQ,
    recv_monitor_message,
)

SECRETS = SeededSecrets()
_REAL = tuple(f"torchestra.engine.{name}" for name in ("memory", "native", "recorder", "diagnosis"))
"""Whatever maps, compiles, records or looks at stacks: it neither waits nor decides."""

_PACKAGES = (autograd, engine, launcher, process_group, rendezvous, rpc, store, system, transport, world)

_POLLS = (0.0005, 0.005, 0.05)
_POLL_INTERVALS = (0.05, 0.4)


def _impatient(size: int) -> SpinPolicy:
    """Have kernels return at once where they would wait: only one thread runs at a time."""
    return SpinPolicy(0, 0, 0.0)


_check = RankContext.check


def _wait_as_a_kernel(context: RankContext, blocked: int) -> None:
    """Wait as a kernel does that sleeps on another rank's flag: until that changes, or for a poll interval.

    How soon a rank notices the change is drawn, and how long it sleeps without one: as the product has it, or
    as on a machine that is busy.
    """
    run = active()
    assert run is not None
    arena, choices = context.arena, run.choices

    def seen() -> tuple[int, ...]:
        state = arena.load_word(arena.control(blocked) + at.STATE)
        return arena.load_word(at.HEADER_ABORT), state, arena.progress(blocked)

    before = seen()
    run.wait_until(
        lambda: context.closed or seen() != before,
        lambda: choices.choice(_POLLS),
        choices.choice(_POLL_INTERVALS),
    )


def _check_after_a_wait(
    self: RankContext,
    doing: str,
    blocked: int | None,
    deadline: Deadline | None,
    suspect: int | None = None,
    **named: Any,
) -> int | None:
    """Let the time pass that a kernel would have waited. Without a deadline none has been called."""
    run = active()
    if run is not None and deadline is not None:
        self.sleep_times.set(0.0)
        if blocked is None or suspect is not None or named.get("alone"):
            run.wait(run.choices.choice(_POLLS))
        else:
            _wait_as_a_kernel(self, blocked)
    return _check(self, doing, blocked, deadline, suspect, **named)


_exchange = ArenaRegisters._exchange
_sleepers: dict[int, list[Task]] = {}
"""The threads that wait for a step of an agreement, by the address of its decision."""


def _sleep_until_a_step(self: ArenaRegisters, seconds: float) -> None:
    """Wait as the kernel's futex does, which would stop all threads: only one runs at a time."""
    run = active()
    assert run is not None
    if shared_words.load_acquire(self._decision) == self._seen:
        sleepers = _sleepers.setdefault(self._decision, [])
        task = run.me()
        sleepers.append(task)
        try:
            run.wait(seconds)
        finally:
            if task in sleepers:
                sleepers.remove(task)


def _exchange_and_wake(self: ArenaRegisters, *arguments: Any) -> bool:
    taken = _exchange(self, *arguments)
    run = active()
    if taken and run is not None:
        for task in _sleepers.pop(self._decision, ()):
            run.wake(task)
    return taken


def _start_no_publisher(self: RecordPublisher, name: str) -> None:
    """Let no thread wait, in a kernel, for readers outside of the job: a simulation has none."""


def _frames_of_the_process() -> dict[int, FrameType]:
    """Return the frames of the threads of one simulated process."""
    run = active()
    return current_frames() if run is None or run.is_ending else run.frames()


_await_future = calls._await_future


def _await_simulated(future: Any) -> Any:
    """Wait for a future, which is C++'s, so that other threads run meanwhile."""
    run = active()
    while run is not None and not future.done():
        run.wait(_POLLS[0])
    return _await_future(future)


class _Numbered:
    """Hash objects by when they are first hashed: by address, a set's order differs from run to run."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def begin(self) -> None:
        """Number from 0 again."""
        self._numbers = itertools.count()

    def hash_of(self, each: Any) -> int:
        number: int | None = each.__dict__.get("_simulated_hash")
        if number is None:
            number = each.__dict__["_simulated_hash"] = next(self._numbers)
        return number


NUMBERED = _Numbered()


def _hash_by_number(each: Any) -> int:
    return NUMBERED.hash_of(each)


_IN_SETS = (PairConnection, Peer, Connection, SessionPool, _Transfer)


@functools.cache
def _import_all() -> None:
    """Import now what the product would import later."""
    for package in _PACKAGES:
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not each.name.endswith("__main__"):
                importlib.import_module(each.name)


def _modules() -> list[ModuleType]:
    """Return the product's modules."""
    _import_all()
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torchestra.") and not name.startswith(_REAL)
    ]


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Replace clocks, threads and sockets in the product; they are the real ones outside of a simulation."""
    seams: dict[ModuleType, object] = {
        time: SimulatedTime(),
        threading: SimulatedThreading(),
        queue: SimulatedQueues(),
        select: SimulatedSelect(),
        selectors: SimulatedSelectors(),
        socket: SimulatedSockets(),
        os: SimulatedOS(SECRETS),
        secrets: SECRETS,
        zmq: SimulatedZeroMQ(SECRETS),
    }
    by_identity = {id(real): seam for real, seam in seams.items()}
    with contextlib.ExitStack() as patches:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and (seam := by_identity.get(id(value))) is not None:
                    patches.enter_context(mock.patch.object(module, name, seam))
        for place, name, replacement in (
            (event_loop, "Listener", SimulatedListener),
            (event_loop, "Inbox", SimulatedInbox),
            (source_port, "_PORTS", 0),  # the system's, and there are no strangers
            (pair, "recv_monitor_message", recv_monitor_message),
            (joining, "spin_policy", _impatient),
            (shrinking, "spin_policy", _impatient),
            (rank_context.RankContext, "check", _check_after_a_wait),
            (ArenaRegisters, "sleep", _sleep_until_a_step),
            (ArenaRegisters, "_exchange", _exchange_and_wake),
            (RecordPublisher, "start", _start_no_publisher),
            (router, "SharedMemoryEndpoint", endpoint_in_shared_memory),
            (callsites, "current_frames", _frames_of_the_process),
            (calls, "_await_future", _await_simulated),
            (sockets, "_TICK", _POLLS[1]),
            (hierarchy, "_POLL_SECONDS", _POLL_INTERVALS[1] / 2),
            (termination, "_PAUSE_SECONDS", _POLLS[1]),
            (departing, "_PAUSE_SECONDS", _POLLS[1]),
        ):
            patches.enter_context(mock.patch.object(place, name, replacement))
        for kind in _IN_SETS:
            patches.enter_context(mock.patch.object(kind, "__hash__", _hash_by_number))
        # What is open at the end of the process is closed then, which workers of a simulation cannot be.
        patches.enter_context(mock.patch.object(starting, "_open", weakref.WeakSet()))
        yield


def begin(seed: object) -> None:
    """Make the product's random bytes and numbers those of a seed."""
    SECRETS.choices.seed(f"{seed} secrets")
    NUMBERED.begin()
    _sleepers.clear()
