"""Every error torchestra raises, grouped by who caused it.

========================  =====================================================================
you                       :class:`InvalidArgumentError`, :class:`InvalidShapeError`,
                          :class:`UnpicklableObjectError`, :class:`UnsupportedArgumentError`,
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

The four bases carry the names of torch.distributed's public error types, so that code that catches
these by name keeps its meaning. A failed ``assert`` inside torchestra is a bug of torchestra.
"""

from __future__ import annotations

import pickle
import reprlib
import sys
from collections.abc import Mapping, Sequence
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
    "UnsupportedArgumentError",
    "WorkerFailedError",
]


_MAX_SHOWN = 100


class _ShortRepr(reprlib.Repr):
    """Shows the first elements of containers, and no elements of tensors, whose memory may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 16
        self.maxstring = self.maxlong = self.maxother = _MAX_SHOWN

    def repr1(self, x: Any, level: int) -> str:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            return f"<{type(x).__name__} of shape {list(x.shape) if not x.is_nested else '?'}, {x.dtype}>"
        return super().repr1(x, level)


def shown(value: object) -> str:
    """Return a value as text for messages: on one line, not too long, even if its ``repr`` raises."""
    try:
        text = _ShortRepr().repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    text = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def named(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ranks as messages name them: ``rank 3``, ``ranks 0, 2``; only count those beyond ``most``."""
    rest = f" and {len(ranks) - most} more" if most is not None and len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{rest}"


def named_globally(ranks: Sequence[int], global_ranks: Sequence[int] | Mapping[int, int]) -> str:
    """Return ranks of a group as messages name them: ``rank 1``, or ``rank 1 (global rank 3)``.

    Args:
        global_ranks: by rank in the group; -1: it has none; empty: they are the same numbers.
    """
    found = [global_ranks[rank] for rank in ranks] if global_ranks else []
    numbers = found if min(found, default=-1) >= 0 else list(ranks)
    return named(ranks) + (f" (global {named(numbers)})" if numbers != list(ranks) else "")


class DistError(RuntimeError):
    """Base of every error that torchestra raises on purpose."""


class DistBackendError(DistError):
    """An operation of a process group failed."""


class DistNetworkError(DistError):
    """A socket could not be opened, or a connection was refused or lost."""


class DistStoreError(DistError):
    """A key-value store could not carry out a request."""


class InvalidArgumentError(DistError, ValueError):
    """An argument was refused before anything was sent. The group stays usable."""


class NotInitializedError(DistError, ValueError):
    """There is no default process group, or none of the given name, in this process (or thread)."""


class NothingToDestroyError(NotInitializedError, AssertionError):
    """There is no default group to destroy. An AssertionError as well, because torch raises one there."""


class NotReadyError(DistError):
    """An object cannot do this yet; the message says what must happen first. Nothing was sent."""


class GroupDestroyedError(DistBackendError):
    """This rank has destroyed the group; nothing can be sent over it any more."""


class ForkedProcessError(GroupDestroyedError):
    """A process forked from a rank used a group of that rank, but is not a member of the group.

    Nothing was sent, and the rank is not affected.
    """


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group called different operations at the same place in the group's order.

    Raised on every rank of the group; none of them has sent or received anything, and the group
    stays usable, unless it is a :class:`LateMismatchError`.
    """


class GroupAbortedError(DistBackendError):
    """Another rank left an operation of this group halfway, so the group can no longer be used.

    Destroy it, and make a new one if the ranks are to go on.
    """


class LateMismatchError(CollectiveMismatchError, GroupAbortedError):
    """The ranks of a group called different operations, and some had gone on before this was found.

    This can happen if one of the operations was a small broadcast, reduce, gather or scatter, in which a rank
    does not wait for ranks that send it nothing. Raised on every rank, by this or a later operation; the
    group can no longer be used.
    """


class GradientReductionError(DistError):
    """Some gradient of a DistributedDataParallel was not computed exactly once between two reductions.

    Raised on the ranks where this happened; the gradients of the step are not averaged there. Ranks that wait
    for such a rank get an error when it leaves the group.
    """


class UnevenInputsError(DistError):
    """A rank ran out of inputs in a Join with ``throw_on_early_termination``.

    Raised on every rank of the group; the group stays usable.
    """


class JoinInterruptedError(DistError):
    """An exception ended a Join on another rank, which takes no further part in its steps.

    Raised on the ranks that would have waited for it; the group stays usable.
    """


class ObjectTransferError(DistError):
    """An object could not be pickled on the rank that has it, or unpickled on a rank that receives it.

    The group stays usable.

    Attributes:
        ranks: the ranks, in the group's numbering, that these objects come from.
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
    """The other ranks have shrunk the group and go on without this rank, or are about to.

    This rank can do nothing more in the group, and is not a member of the new one.

    Attributes:
        survivors: the ranks that go on, in the numbering of the old group; empty while this is undecided.
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
    """Base of the errors of remote calls, remote references and distributed backward passes."""


class RpcTimeoutError(RpcError, TimeoutError):
    """A remote call did not return, or the value of a remote reference did not arrive, in time."""


class CallLostError(RpcTimeoutError):
    """A worker that loses messages on purpose, for tests (rpc/faulty.py), lost a remote call.

    The called worker never received it.
    """


class WorkerFailedError(RpcError):
    """The called worker is gone: it died, or it has shut down.

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

    The message has the exception's text and traceback. Any other exception of a remote function is raised
    with its own type and has a RemoteError as its ``__cause__``; if its type cannot be constructed from a
    text alone, the exception is of both types.
    """


class RemoteNameError(RpcError, AttributeError):
    """The called worker has no function or class of the name that the caller sent."""


class BackwardError(RpcError):
    """A distributed backward pass failed, or could not begin, because of an error on some worker.

    The message names the worker by its rank and has the traceback; the cause is the error itself, where it
    can be rebuilt here.
    """


class RemoteReferenceError(RpcError):
    """A remote reference cannot be used in this way, or its owner has no value for it (any more)."""


class RankError(DistError):
    """A rank that :func:`torchestra.launch` started failed; the launcher has ended the other ranks.

    Its ``__cause__`` is the exception that the rank raised, where that could be pickled.

    Attributes:
        rank: the rank that failed; if several did, the first.
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
    """Ranks that :func:`torchestra.launch` started had not finished in time; the launcher has ended them all.

    Attributes:
        ranks: the ranks that had not finished.
        tracebacks: the stacks of these ranks when they were interrupted, as text; empty if unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), tracebacks: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tracebacks = tracebacks

    def __reduce__(self) -> tuple[type[LaunchTimeoutError], tuple[str, tuple[int, ...], str]]:
        return type(self), (str(self), self.ranks, self.tracebacks)


class InvalidShapeError(InvalidArgumentError, AssertionError):
    """A tensor, a list of lengths or a mesh does not have the required shape; nothing was sent.

    An AssertionError as well, because torch raises one there.
    """


class UnknownDimensionError(InvalidArgumentError, KeyError, IndexError):
    """A mesh has no dimension of that name, or not at that position."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError shows its message in quotes


class InvalidArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument does not have the required type. It was refused before anything was sent."""


class UnsupportedArgumentError(InvalidArgumentError, NotImplementedError):
    """An argument means something that makes sense and is not served; nothing was sent.

    A NotImplementedError as well, because torch raises one there.
    """


class UnpicklableObjectError(InvalidArgumentTypeError, pickle.PicklingError, AttributeError):
    """An object to be sent cannot be pickled. No object was sent; the group stays usable.

    Raised on the rank that has the object; its ``__cause__`` is what pickling raised. It is a TypeError, a
    PicklingError and an AttributeError as well, because pickling may raise any of the three.
    """
