"""Pending results of functional collectives: the operation that fills each tensor.

A result is identified by its storage, because the tensor object that an operator returns is not always the
one that its caller gets. The table refers to storages weakly: an entry is removed with its memory (which the
operation itself keeps alive while it runs).
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchestra.communicator.work import Work

_FEW = 64


class _Entry:
    """One operation, and the storage that it fills."""

    __slots__ = ("owner", "storage", "what", "work")

    def __init__(self, tensor: torch.Tensor, work: Work, owner: object, what: str) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.work = work
        self.owner: weakref.ref[Any] = weakref.ref(owner)
        self.what = what

    @property
    def is_over(self) -> bool:
        """Return whether no tensor can ask for it any more, and it has no failure left to report."""
        return self.storage.expired() and self.work.is_success()


_entries: dict[int, _Entry] = {}
_lock = threading.Lock()
_sweep_above = _FEW
_told_at_exit = False


def expect(tensor: torch.Tensor, work: Work, owner: object, what: str, *, keeps_result: bool = False) -> None:
    """Note that ``tensor`` is filled by ``work``, an operation of the group ``owner``.

    Args:
        keeps_result: ``tensor`` is a handle only, and the work keeps its result.
    """
    global _sweep_above, _told_at_exit
    if not keeps_result:
        work.forget_result()
    entry = _Entry(tensor, work, owner, what)
    with _lock:
        _entries[entry.storage.cdata] = entry
        if len(_entries) > _sweep_above:
            for key in [key for key, old in _entries.items() if old.is_over]:
                del _entries[key]
            _sweep_above = max(_FEW, 2 * len(_entries))
        if not _told_at_exit:
            _told_at_exit = True
            atexit.register(report)


def find(tensor: torch.Tensor) -> Work | None:
    """Return the operation that fills the tensor, if it has not been waited for."""
    entry = _entries.get(tensor.untyped_storage()._cdata)
    return None if entry is None else entry.work


def wait_for(tensor: torch.Tensor) -> None:
    """Wait until the tensor's contents are there; return at once for a tensor that is not in the table.

    Raises:
        DistError: the operation has failed; raised on every call.
    """
    key = tensor.untyped_storage()._cdata
    entry = _entries.get(key)
    if entry is not None:
        entry.work.wait()
        with _lock:
            if _entries.get(key) is entry:
                del _entries[key]


def count(owner: object | None = None) -> int:
    """Return how many results (of a group) have not been waited for and are still there."""
    with _lock:
        mine = [entry for entry in _entries.values() if owner is None or entry.owner() is owner]
    return len([entry for entry in mine if not entry.storage.expired()])


def report(owner: object | None = None) -> None:
    """Warn of results (of a group) that were never waited for, and of failures that were never raised.

    Called when a group is destroyed, and for all remaining results when the process ends.
    """
    with _lock:
        keys = [key for key, entry in _entries.items() if owner is None or entry.owner() is owner]
        left = [_entries.pop(key) for key in keys]
    failed = [entry for entry in left if entry.work.exception() is not None]
    kept = [entry for entry in left if entry in failed or not entry.storage.expired()]
    if not kept:
        return
    first = (failed or kept)[0]
    text = (
        f"results of functional collectives were never waited for: {len(kept)}, the first of {first.what};"
        " use the result, or call wait_tensor() on it"
    )
    if failed:
        text += f". It had failed: {first.work.exception()!r}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
