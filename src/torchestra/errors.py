"""Every error torchestra raises, grouped by who caused it.

========================  =====================================================================
you                       :class:`InvalidArgumentError`, :class:`NotInitializedError`,
                          :class:`GroupDestroyedError`, :class:`CollectiveMismatchError`
a peer                    :class:`RankFailedError`, :class:`GroupAbortedError`
time                      :class:`CollectiveTimeoutError`, :class:`StoreTimeoutError`
the machine, the network  :class:`DistNetworkError`, :class:`DistStoreError`
========================  =====================================================================

The four bases carry the names of torch.distributed's public error types, so that code which catches
those by name keeps its meaning. A failed ``assert`` inside torchestra is a bug of torchestra.
"""

from __future__ import annotations

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "GroupAbortedError",
    "GroupDestroyedError",
    "InvalidArgumentError",
    "NotInitializedError",
    "RankFailedError",
    "StoreTimeoutError",
]


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


class GroupDestroyedError(DistBackendError):
    """The group was destroyed by this rank; nothing can be sent over it any more."""


class CollectiveMismatchError(DistBackendError):
    """The ranks of a group called different operations at the same place in the group's order.

    Raised on every rank of the group; none of them has sent or received anything, and the group
    stays usable.
    """


class GroupAbortedError(DistBackendError):
    """Another rank left an operation of this group halfway, so the group can no longer be used.

    Destroy it, and make a new one if the ranks go on.
    """


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
