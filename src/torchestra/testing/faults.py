"""Faults at chosen moments, to test what a program does when a rank dies, lags, or never comes.

Every rank injects the same fault, which acts on one of them::

    with faults.kill(rank=1, at="all_reduce", nth=3):
        train()

It acts just before the rank runs the operation named by ``at`` (the name of a function of torchestra, or None
for any) for the ``nth`` time in the group since the fault was injected. Without ``with`` it stays in force
until :meth:`Fault.remove` or the end of the group. Ranks are in the group's numbering.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torchestra.engine.operations import COLLECTIVES
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.errors import CollectiveTimeoutError, DistError, InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.system.deadline import Deadline
from torchestra.world.init import default_group

__all__ = [
    "OPERATIONS",
    "DroppedOut",
    "Fault",
    "RankKilled",
    "delay",
    "draw",
    "drop_out",
    "intercept",
    "kill",
    "slow",
]

OPERATIONS = (*COLLECTIVES, "send", "recv", "isend", "irecv")
"""The operations that a fault can come before."""

_POLL_INTERVAL_S = 0.01
_AFTER_TIMEOUT_S = 5.0


class RankKilled(BaseException):
    """A rank that is a thread was killed by :func:`kill`. Not an Exception, so that no handler catches it."""


class DroppedOut(DistError):
    """Raised on a rank that :func:`drop_out` kept from an operation, once the group has been aborted."""


class Fault:
    """An event that befalls one rank of a group before an operation. A context manager, in force at once.

    Attributes:
        rank: the rank that it acts on.
        at: the operation that it acts before, None for any.
        nth: which call of that operation, counted from 1; None for every call.
        calls: how many such calls this rank has begun since.
    """

    def __init__(
        self,
        rank: int,
        at: str | None,
        nth: int | None,
        act: Callable[[Fault], None],
        group: ProcessGroup | None,
    ) -> None:
        self.group = default_group() if group is None else group
        if at is not None and at not in OPERATIONS:
            raise InvalidArgumentError(f"faults: at must be one of {', '.join(OPERATIONS)}, got {at!r}")
        if not 0 <= rank < self.group.size():
            raise InvalidArgumentError(
                f"faults: rank must be in 0 to {self.group.size() - 1}, got {rank} for {self.group!r}"
            )
        if nth is not None and nth < 1:
            raise InvalidArgumentError(f"faults: nth counts from 1, got {nth}")
        self.rank = rank
        self.at = at
        self.nth = nth
        self.calls = 0
        self._act = act
        if self.group.rank() == rank:
            _intercepted(self.group).append(self)

    def remove(self) -> None:
        """Remove the fault; a second call does nothing."""
        faults = _intercepted(self.group)
        if self in faults:
            faults.remove(self)

    def before(self, operation: str) -> None:
        """Act if the operation, about to begin on the fault's rank, is the one to act on."""
        if self.at in (None, operation):
            self.calls += 1
            if self.nth in (None, self.calls):
                self._act(self)

    def after(self) -> None:
        """Note that an operation has ended."""

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def kill(rank: int, at: str | None = "all_reduce", nth: int = 1, group: ProcessGroup | None = None) -> Fault:
    """Kill a rank: by SIGKILL where it is a process, by :class:`RankKilled` where it is a thread."""
    return Fault(rank, at, nth, _kill, group)


def delay(
    rank: int,
    seconds: float,
    at: str | None = None,
    nth: int | None = None,
    group: ProcessGroup | None = None,
) -> Fault:
    """Make a rank ``seconds`` late for an operation, by default for every one."""
    return Fault(rank, at, nth, lambda fault: time.sleep(seconds), group)


def drop_out(
    rank: int, at: str | None = "all_reduce", nth: int = 1, group: ProcessGroup | None = None
) -> Fault:
    """Keep a live rank from an operation.

    The rank waits until its peers have given up, and then raises :class:`DroppedOut`; if they have not some
    seconds after the group's time-out, it raises a CollectiveTimeoutError.
    """
    return Fault(rank, at, nth, _drop_out, group)


def slow(rank: int, factor: float, group: ProcessGroup | None = None) -> Fault:
    """Make a rank a straggler: its work between operations takes ``factor`` times as long."""
    if factor < 1:
        raise InvalidArgumentError(f"faults.slow: factor must be at least 1, got {factor}")
    return _Slowness(rank, factor, group)


def draw(
    seed: int,
    kinds: Sequence[Callable[..., Fault]] = (kill, drop_out),
    operations: Sequence[str] = ("all_reduce",),
    within: int = 10,
    group: ProcessGroup | None = None,
) -> Fault:
    """Return a fault whose kind, rank and operation the seed decides, the same on all ranks.

    Args:
        kinds: the functions to choose from, of this module, that take rank, at and nth.
        operations: the values to choose ``at`` from.
        within: the largest ``nth``.
    """
    group = default_group() if group is None else group
    generator = random.Random(seed)
    kind, rank = generator.choice(list(kinds)), generator.randrange(group.size())
    return kind(
        rank=rank, at=generator.choice(list(operations)), nth=generator.randint(1, within), group=group
    )


class _Slowness(Fault):
    def __init__(self, rank: int, factor: float, group: ProcessGroup | None) -> None:
        self._factor = factor
        self._ended = time.monotonic()
        super().__init__(rank, None, None, self._lag, group)

    def _lag(self, fault: Fault) -> None:
        time.sleep((self._factor - 1) * (time.monotonic() - self._ended))

    def after(self) -> None:
        self._ended = time.monotonic()


def _kill(fault: Fault) -> None:
    if current_thread_rank() is None:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RankKilled(f"rank {fault.rank} was killed before its {fault.calls}. {fault.at or 'operation'}")


def _drop_out(fault: Fault) -> None:
    group = fault.group
    context = group.communicator.engine.context
    deadline = Deadline(group.timeout.total_seconds() + _AFTER_TIMEOUT_S)
    for _ in deadline.polls(_POLL_INTERVAL_S):
        if context.is_aborted:
            raise DroppedOut(f"rank {fault.rank} stayed away from {fault.at} until its group was aborted")
    raise CollectiveTimeoutError(
        f"rank {fault.rank} stayed away from {fault.at} for longer than the time-out of group"
        f" {group.group_name!r}, and its peers have not given up"
    )


_FAULTS = "_faults_of_testing"


def _intercepted(group: ProcessGroup) -> list[Fault]:
    """Return the faults of a group, and intercept its operations on this rank from now on."""
    communicator = group.communicator
    faults: list[Fault] | None = communicator.__dict__.get(_FAULTS)
    if faults is not None:
        return faults
    active: list[Fault] = []

    def before(name: str) -> None:
        for fault in tuple(active):
            fault.before(name)

    def after(name: str) -> None:
        for fault in tuple(active):
            fault.after()

    setattr(communicator, _FAULTS, active)
    intercept(communicator, before, after)
    return active


def intercept(
    communicator: object, before: Callable[[str], object], after: Callable[[str], object]
) -> Callable[[], None]:
    """Call functions with an operation's name before and after each operation of a communicator.

    Returns:
        A function that undoes it.
    """
    inside = threading.local()  # a call inside another operation does not count

    def intercepting(method: str) -> Callable[..., Any]:
        operation = getattr(communicator, method)

        @functools.wraps(operation)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "operation", None) is not None:
                return operation(*args, **kwargs)
            inside.operation = name = args[0].name if method == "collective" else method
            try:
                before(name)  # may raise: then the operation does not run
                try:
                    return operation(*args, **kwargs)
                finally:
                    after(name)
            finally:
                inside.operation = None

        return intercepted

    own = vars(communicator)
    methods = [method for method in ("collective", *OPERATIONS) if hasattr(communicator, method)]
    saved = {method: own[method] for method in methods if method in own}
    own.update({method: intercepting(method) for method in methods})

    def undo() -> None:
        for method in methods:
            del own[method]
        own.update(saved)

    return undo
