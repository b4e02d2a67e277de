"""Every error torchestra raises, grouped by who caused it.

========================  =====================================================================
you                       :class:`InvalidArgumentError`, :class:`InvalidShapeError`,
                          :class:`UnpicklableObjectError`,
                          :class:`UnknownDimensionError`, :class:`NotInitializedError`,
                          :class:`NotReadyError`, :class:`NothingToDestroyError`,
                          :class:`GroupDestroyedError`, :class:`ForkedProcessError`,
                          :class:`CollectiveMismatchError`,
                          :class:`GradientReductionError`, :class:`UnevenInputsError`
a peer                    :class:`RankFailedError`, :class:`GroupAbortedError`,
                          :class:`RankExcludedError`, :class:`JoinInterruptedError`
a rank you launched       :class:`RankError`
a worker you called       :class:`RemoteError`, :class:`WorkerFailedError`,
                          :class:`RemoteNameError`, :class:`RemoteReferenceError`, :class:`BackwardError`
time                      :class:`CollectiveTimeoutError`, :class:`StoreTimeoutError`,
                          :class:`LaunchTimeoutError`, :class:`RpcTimeoutError`
the machine, the network  :class:`DistNetworkError`, :class:`DistStoreError`
========================  =====================================================================

The four bases carry the names of torch.distributed's public error types, so that code which catches
those by name keeps its meaning. A failed ``assert`` inside torchestra is a bug of torchestra.
"""

from __future__ import annotations

import pickle
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

__all__ = [
    "BackwardError",
    "CallLostError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "ForkedProcessError",
    "GradientReductionError",
    "GroupAbortedError",
    "GroupDestroyedError",
    "InvalidArgumentError",
    "InvalidArgumentTypeError",
    "JoinInterruptedError",
    "LateMismatchError",
    "LaunchTimeoutError",
    "NotInitializedError",
    "NotReadyError",
    "NothingToDestroyError",
    "ObjectTransferError",
    "QueueEmptyError",
    "RankError",
    "RankExcludedError",
    "RankFailedError",
    "RemoteError",
    "RemoteNameError",
    "RemoteReferenceError",
    "RpcError",
    "RpcTimeoutError",
    "StoreTimeoutError",
    "UnevenInputsError",
    "UnpicklableObjectError",
    "WorkerFailedError",
]


_MOST_SHOWN = 100


class _Brief(reprlib.Repr):
    """Shows containers by their first elements, and tensors without looking at these, which may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 16
        self.maxstring = self.maxlong = self.maxother = _MOST_SHOWN

    def repr1(self, x: Any, level: int) -> str:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            return f"<{type(x).__name__} of shape {list(x.shape) if not x.is_nested else '?'}, {x.dtype}>"
        return super().repr1(x, level)


def shown(value: object) -> str:
    """Return a value as it is put in messages: on one line, not too long, and whatever its ``repr`` does."""
    try:
        text = _Brief().repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def named(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks as messages name them: ``rank 3``, ``ranks 0, 2``; of more than ``most`` only how many."""
    rest = f" and {len(ranks) - most} more" if most is not None and len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{rest}"


class DistError(RuntimeError):
    """Base of every error that torchestra raises on purpose."""


class DistBackendError(DistError):
    """An operation of a process group failed."""


class DistNetworkError(DistError):
    """A socket could not be opened, or a connection was refused or lost."""


class DistStoreError(DistError):
    """A key-value store could not do what it was asked."""


class InvalidArgumentError(DistError, ValueError):
    """An argument was refused before anything was sent. The group stays usable."""


class NotInitializedError(DistError, ValueError):
    """There is no default process group, or none of the given name, in this process (or thread)."""


class NothingToDestroyError(NotInitializedError, AssertionError):
    """There is no default group to destroy; an AssertionError too, as where programs expect torch's."""


class NotReadyError(DistError):
    """An object cannot do this yet; the message says what must come before. Nothing was sent."""


class GroupDestroyedError(DistBackendError):
    """The group was destroyed by this rank; nothing can be sent over it any more."""


class ForkedProcessError(GroupDestroyedError):
    """A process that was forked from a rank has used a group of that rank, of which it is no part.

    Nothing was sent, and the rank is not disturbed.
    """


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group called different operations at the same place in the group's order.

    Raised on every rank of the group; none of them has sent or received anything, and the group
    stays usable, unless it is a :class:`LateMismatchError`.
    """


class GroupAbortedError(DistBackendError):
    """Another rank left an operation of this group halfway, so the group can no longer be used.

    Destroy it, and make a new one if the ranks go on.
    """


class LateMismatchError(CollectiveMismatchError, GroupAbortedError):
    """The ranks of a group called different operations, and some had gone on when that was found.

    That can be where one of them was a small broadcast, reduce, gather or scatter, in which no rank waits for
    those whom it has nothing from. Raised on every rank, by this or a later operation; the group can no
    longer be used.
    """


class GradientReductionError(DistError):
    """The gradients of a DistributedDataParallel were not each computed once between two reductions.

    Raised on the ranks where that happened; the gradients of the step are not averaged there. Ranks that wait
    for such a rank hear of it when it leaves the group.
    """


class UnevenInputsError(DistError):
    """A rank has run out of inputs in a Join with ``throw_on_early_termination``.

    Raised on every rank of the group; the group stays usable.
    """


class JoinInterruptedError(DistError):
    """An exception has ended a Join on another rank, which will not take part in its steps any more.

    Raised on the ranks that would have waited for it; the group stays usable.
    """


class ObjectTransferError(DistError):
    """An object could not be pickled on the rank that has it, or not be unpickled on the one that gets it.

    The group stays usable.

    Attributes:
        ranks: the ranks, in the group's numbering, whose objects these are.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[ObjectTransferError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class RankFailedError(GroupAbortedError):
    """A rank of the group died (its process ended, or its thread left the group).

    Attributes:
        ranks: the ranks, in the group's numbering, that are known to be dead.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class RankExcludedError(GroupAbortedError):
    """The other ranks have shrunk the group and go on without this one, or are about to.

    This rank can do nothing in the group any more, and has no part in the new one.

    Attributes:
        survivors: the ranks that go on, in the numbering of the group that was; empty while that is open.
    """

    def __init__(self, message: str, survivors: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.survivors = survivors

    def __reduce__(self) -> tuple[type[RankExcludedError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.survivors)


class CollectiveTimeoutError(DistBackendError, TimeoutError):
    """An operation did not finish in time. The group can no longer be used.

    Attributes:
        missing: the ranks, in the group's numbering, that had not arrived.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type[CollectiveTimeoutError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.missing)


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A key did not appear in a store in time; the store itself stays usable."""


class QueueEmptyError(DistStoreError):
    """``queue_pop(key, block=False)`` found nothing in the queue."""


class RpcError(DistError):
    """Base of what goes wrong in a remote call outside of the function that was called."""


class RpcTimeoutError(RpcError, TimeoutError):
    """A remote call, or the value of a remote reference, did not come within its time."""


class CallLostError(RpcTimeoutError):
    """A remote call was lost by a worker that is to lose some (rpc/faulty.py).

    The worker called knows nothing of it.
    """


class WorkerFailedError(RpcError):
    """The worker that was called is gone: it died, or it has shut down.

    Attributes:
        worker: its name.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerFailedError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class RemoteError(RpcError):
    """A function failed on another worker, with an exception that cannot be rebuilt here.

    The message has its text and its traceback. Every other exception of a remote function is raised as what
    it is, and has one of these as its ``__cause__``; one that cannot be made from a text alone is both.
    """


class RemoteNameError(RpcError, AttributeError):
    """The worker that was called does not know a function or class by the name that it was sent by."""


class BackwardError(RpcError):
    """A distributed backward pass failed, or cannot begin: something raised an error in it on some worker.

    The message names the worker by its rank and has the traceback; the cause is the error itself, where it
    can be rebuilt here.
    """


class RemoteReferenceError(RpcError):
    """A remote reference cannot be used like this, or its owner has nothing under it (any more)."""


class RankError(DistError):
    """A rank that :func:`torchestra.launch` started failed; the other ranks have been ended.

    Its ``__cause__`` is the exception that the rank raised, where that could be pickled.

    Attributes:
        rank: the rank that failed, the first where several did.
        exit_code: the exit code of its process; minus the signal's number where a signal killed it.
            1 for a rank that is a thread.
        traceback: the rank's traceback as text; empty where there was none.
    """

    def __init__(self, message: str, rank: int, exit_code: int = 1, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int, int, str]]:
        return type(self), (str(self), self.rank, self.exit_code, self.traceback)


class LaunchTimeoutError(DistError, TimeoutError):
    """Ranks that :func:`torchestra.launch` started had not finished in time; all have been ended.

    Attributes:
        ranks: the ranks that had not finished.
        tracebacks: where these ranks were when they were interrupted, as text; empty where unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), tracebacks: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tracebacks = tracebacks

    def __reduce__(self) -> tuple[type[LaunchTimeoutError], tuple[str, tuple[int, ...], str]]:
        return type(self), (str(self), self.ranks, self.tracebacks)


class InvalidShapeError(InvalidArgumentError, AssertionError):
    """A tensor, a list of lengths or a mesh has not the shape that is needed; nothing was sent.

    An AssertionError as well because that is what torch raises there.
    """


class UnknownDimensionError(InvalidArgumentError, KeyError):
    """A mesh has no dimension of that name, or not at that place."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError shows its message in quotes


class InvalidArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument is not of the type that is needed; refused before anything was sent."""


class UnpicklableObjectError(InvalidArgumentTypeError, pickle.PicklingError, AttributeError):
    """An object that was to be sent cannot be pickled. No object was moved; the group stays usable.

    Raised on the rank that has the object; its ``__cause__`` is what pickling raised. It is a TypeError, a
    PicklingError and an AttributeError as well because pickling raises now the one and now the other.
    """
