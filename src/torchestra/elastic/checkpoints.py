"""Checkpoints that all ranks write together while the training goes on.

A checkpoint is a directory ``step-00000123`` in the format of torch.distributed.checkpoint (dcp.py). The
ranks share the values out, and each copies and writes its share; they find each other's files in the file
system alone, so that nothing is sent and nobody is waited for in the training. Rank 0 completes the directory
when all shares are there. Until then it has another name; under its own name it is whole. A rank that cannot
write its share leaves an empty file instead; where it cannot do that either, the next save tells of it.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchestra.elastic import dcp
from torchestra.elastic.dcp import Named
from torchestra.elastic.parts import flatten_tensors, paths_of, unflatten_tensors
from torchestra.errors import InvalidArgumentError, shown
from torchestra.system.deadline import Deadline
from torchestra.system.limits import start_thread

_PREFIX = "step-"
_POLL_S = 0.02
_SILENT_S = 60.0  # without a change of any share that is awaited
_SKELETON = "torchestra.skeleton"


class Checkpoint(NamedTuple):
    """Hold a checkpoint that was read: where from, and the state."""

    path: pathlib.Path
    state: dict[str, Any]


class Writer(NamedTuple):
    """Say which rank writes a checkpoint, of how many, and what they call it before it is whole."""

    rank: int
    ranks: int
    name: str


class Checkpoints:
    """Keep the newest checkpoints of a training in a directory.

    Args:
        directory: the same on all ranks, and shared by their hosts. It is made if there is none. Files in it
            are read as pickles: nobody else may be able to write there.
        every: steps from one to the next.
        keep: how many to keep; older ones are removed.

    Raises:
        InvalidArgumentError: ``every`` or ``keep`` is less than 1.
    """

    def __init__(self, directory: str | pathlib.Path, every: int = 100, keep: int = 2) -> None:
        if every < 1 or keep < 1:
            raise InvalidArgumentError(
                f"Checkpoints: `every` and `keep` must be at least 1, got {shown(every)} and {shown(keep)}"
            )
        self.directory, self.every, self.keep = pathlib.Path(directory), every, keep
        self._copies: list[torch.Tensor] = []
        self._writer: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._abandoned = threading.Event()

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, whole or not; None if there is none."""
        return max((step for step, _ in self._found()), default=None)

    @property
    def busy(self) -> bool:
        """Return whether this rank still writes an earlier one."""
        return self._writer is not None and self._writer.is_alive()

    @property
    def failed(self) -> bool:
        """Return whether this rank could not write its share of the last one."""
        return self._failed is not None

    def save(self, step: int, state: Mapping[str, Any], own: Mapping[str, Any], writer: Writer) -> None:
        """Copy this rank's share of a state, and write the copy in a thread. Every rank calls this.

        The state may change as soon as this returns. The copy stays allocated for the next one. No rank may
        be :attr:`busy`.

        Args:
            step: that the state is of.
            state: nested, the same on all ranks, which share it out.
            own: what only this rank writes, with paths that no other value has.
            writer: this rank.

        Raises:
            OSError: the one before could not be written.
            InvalidArgumentError: two values have the same name.
        """
        self.wait()
        self._abandoned.clear()
        skeleton, _ = flatten_tensors(dict(state))
        mine = {**_share(dcp.flattened(state), writer), **dcp.flattened(own)}
        if writer.rank == 0:
            mine[_SKELETON] = Named((_SKELETON,), (step, skeleton))
        names = [name for name, each in mine.items() if isinstance(each.value, torch.Tensor)]
        for name, copy in zip(names, self._copied([mine[name].value for name in names]), strict=True):
            mine[name] = mine[name]._replace(value=copy)
        self._writer = threading.Thread(
            target=self._write, args=(step, mine, writer), name="torchestra-checkpoint", daemon=True
        )
        start_thread(self._writer)

    def _copied(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if [(each.dtype, each.shape) for each in self._copies] != [
            (each.dtype, each.shape) for each in tensors
        ]:
            self._copies = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.detach())
        return self._copies

    def abandon(self) -> None:
        """Give up a checkpoint of which shares are missing: a rank died or failed; they may never come."""
        self._abandoned.set()

    def wait(self) -> None:
        """Wait until what is being written is on the disk: this rank's share; on rank 0 the whole checkpoint.

        Call it on every rank before the process ends.

        Raises:
            OSError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def load(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if there is none. Damaged ones are warned of."""
        for _, path in sorted(self._found(), reverse=True):
            try:
                return Checkpoint(path, _nested(dcp.read(path)))
            except Exception as error:
                warnings.warn(
                    f"elastic: checkpoint {path} is damaged ({error}); taking the one before", stacklevel=2
                )
        return None

    def _found(self) -> list[tuple[int, pathlib.Path]]:
        with contextlib.suppress(FileNotFoundError):
            return [
                (int(path.name[len(_PREFIX) :]), path)
                for path in self.directory.iterdir()
                if path.name.startswith(_PREFIX) and path.name[len(_PREFIX) :].isdecimal()
            ]
        return []

    def _write(self, step: int, mine: dict[str, Named], writer: Writer) -> None:
        path = self.directory / f"{_PREFIX}{step:08}"
        hidden = self.directory / f".{path.name}.{writer.name}"
        try:
            if writer.rank == 0:
                self._remove_unfinished(hidden)
            hidden.mkdir(parents=True, exist_ok=True)
            dcp.write_share(hidden, writer.rank, mine)
            if writer.rank == 0 and self._all_written(hidden, writer.ranks):
                dcp.write_metadata(hidden, writer.ranks)
                shutil.rmtree(path, ignore_errors=True)  # one of the same step, perhaps damaged
                hidden.rename(path)
                dcp.bring_to_disk(self.directory)
                with contextlib.suppress(PermissionError):  # one that may only be passed through
                    dcp.bring_to_disk(self.directory.absolute().parent)
                self._remove_older(step)
        except BaseException as error:
            self._failed = error
            if isinstance(error, Exception):
                with contextlib.suppress(OSError):  # what is left of it would fill the disk
                    dcp.remove_share(hidden, writer.rank)
                with contextlib.suppress(OSError):  # save_when_due tells it, then
                    dcp.note_failure(hidden, writer.rank)

    def _all_written(self, hidden: pathlib.Path, ranks: int) -> bool:
        """Wait until all ranks have written their shares; return False if some will not come."""
        seen, deadline = -1, Deadline(_SILENT_S)
        while not dcp.shares_written(hidden, ranks):
            size = _bytes_in(hidden)
            if size != seen:
                seen, deadline = size, Deadline(_SILENT_S)
            reason = ""
            if (failed := dcp.failed_rank(hidden, ranks)) is not None:
                reason = f"rank {failed} could not"
            elif self._abandoned.is_set():
                reason = "a rank died or could not"
            elif deadline.expired():
                reason = f"nothing came for {_SILENT_S:.0f} s"
            if reason:
                warnings.warn(
                    f"elastic: not all ranks have written their shares of {hidden.name}, and {reason}: there"
                    " is no checkpoint of this step",
                    stacklevel=2,
                )
                shutil.rmtree(hidden, ignore_errors=True)
                return False
            time.sleep(_POLL_S)
        return True

    def _remove_unfinished(self, present: pathlib.Path) -> None:
        """Remove what is left of checkpoints that failed, or whose ranks were killed."""
        for left in self.directory.glob(f".{_PREFIX}*"):
            if left != present:
                shutil.rmtree(left, ignore_errors=True)

    def _remove_older(self, step: int) -> None:
        """Keep the checkpoint of a step, and some before it. Later ones are damaged, or soon replaced."""
        older = sorted((each for each in self._found() if each[0] <= step), reverse=True)
        for _, old in older[self.keep :]:
            shutil.rmtree(old, ignore_errors=True)


def _bytes_in(directory: pathlib.Path) -> int:
    """Return how many bytes the files of a directory have in which other ranks write and rename."""
    size = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
            size += path.stat().st_size
    return size


def _share(values: dict[str, Named], writer: Writer) -> dict[str, Named]:
    """Return what one rank writes: about as many bytes as the others; what is no tensor, rank 0."""
    loads = [0] * writer.ranks
    mine = {}
    sizes = {
        name: each.value.nbytes if isinstance(each.value, torch.Tensor) else 0
        for name, each in values.items()
    }
    for name in sorted(values, key=lambda each: -sizes[each]):
        rank = loads.index(min(loads)) if sizes[name] else 0
        loads[rank] += sizes[name]
        if rank == writer.rank:
            mine[name] = values[name]
    return mine


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint's values.

    The skeleton has what all ranks have, with everything as it was that DCP does not keep: types of keys, and
    empty containers. It lacks the state of a divided optimizer, ``<optimizer>.state.<index>.<key>``.
    """
    step, skeleton = values[_SKELETON]
    names = [".".join(map(str, path)) for path in paths_of(skeleton)]
    parts = unflatten_tensors(skeleton, [values[name] for name in names])
    common = {*names, *dcp.flattened(parts), _SKELETON}
    for name in values.keys() - common:
        part, _, rest = name.rpartition(".state.")
        index, _, key = rest.partition(".")
        parts[part].setdefault("state", {}).setdefault(int(index), {})[key] = values[name]
    return {"step": step, "parts": parts}
