"""Checkpoints in the format of torch.distributed.checkpoint (DCP), written by ranks that do not communicate.

A name in a checkpoint is a value's path in the nested state, joined by dots; the file ``.metadata`` says in
which file its bytes are. Each rank writes a file with its share of the values, and then what
``torch.distributed.checkpoint`` would have it tell the coordinator. When all ranks' are there, one of them
writes ``.metadata``, and ``checksums``, which DCP does not have. torch's classes plan, write and read.

The package is imported when a checkpoint is written or read, as that takes seconds of a core.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchestra.errors import InvalidArgumentError

KeyPath = tuple[str | int, ...]
_CHECKSUMS = "checksums"
_PLANNED = "__{}_planned"
_FAILED = "__{}_failed"
_CHUNK = 16 << 20


class Named(NamedTuple):
    """Hold a value, and its path in the nested state as DCP has it: keys of dicts are text."""

    path: KeyPath
    value: Any


def flattened(state: Mapping[str, Any]) -> dict[str, Named]:
    """Return the values of a nested state by their names, as DCP names them.

    Raises:
        InvalidArgumentError: two values have the same name, as those of ``a.b`` and of ``b`` in ``a``.
    """
    found: dict[str, Named] = {}

    def visit(path: KeyPath, each: Any) -> None:
        if isinstance(each, Mapping):
            for key, inner in each.items():
                visit((*path, str(key)), inner)
        elif isinstance(each, list) and not _is_plain(each):
            for index, inner in enumerate(each):
                visit((*path, index), inner)
        else:
            name = ".".join(map(str, path))
            if name in found:
                raise InvalidArgumentError(f"elastic.State: two values of the state are called {name!r}")
            found[name] = Named(path, each)

    visit((), state)
    return found


def _is_plain(values: list[Any]) -> bool:
    """Return whether a list is one value to DCP: it has no tensor in it, and no dict."""
    return not any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and not _is_plain(each))
        for each in values
    )


def write_share(directory: Path, rank: int, values: dict[str, Named]) -> None:
    """Write a rank's values into files of its own, which are on the disk when this returns.

    Raises:
        OSError: they cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: each.value for name, each in values.items()}, is_coordinator=rank == 0)
    writer = FileSystemWriter(directory, sync_files=False, overwrite=False)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]  # a file's name has the rank
    try:
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        free = shutil.disk_usage(directory).free  # torch's writer does not say what the system has said
        raise OSError(f"{directory} cannot be written, on a disk with {free} free bytes: {error}") from error
    files = {each.storage_data.relative_path for each in results}
    for name in files:  # torch's own option does so before the last part has left Python's buffer
        bring_to_disk(directory / name)
    planned = _Planned(plan, results, {name: each.path for name, each in values.items()})
    told = {name: checksum(directory / name) for name in files}
    hidden = directory / f".{_PLANNED.format(rank)}"
    hidden.write_bytes(pickle.dumps((planned, told)))
    hidden.rename(directory / _PLANNED.format(rank))


def remove_share(directory: Path, rank: int) -> None:
    """Remove what there is of a rank's share, after an error."""
    for pattern in (f"__{rank}_*", f".__{rank}_*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def note_failure(directory: Path, rank: int) -> None:
    """Tell rank 0 that a rank's share will not come; an empty file needs no room on a full disk.

    Raises:
        OSError: even that cannot be written.
    """
    (directory / _FAILED.format(rank)).touch()


def failed_rank(directory: Path, ranks: int) -> int | None:
    """Return a rank that has told of its failure, if there is one."""
    return next((rank for rank in range(ranks) if (directory / _FAILED.format(rank)).exists()), None)


class _Planned(NamedTuple):
    """Hold what a rank tells the one that writes ``.metadata``: torch's plan and results; paths by name."""

    plan: Any
    results: Any
    paths: dict[str, KeyPath]


def shares_written(directory: Path, ranks: int) -> bool:
    """Return whether all ranks have written their shares."""
    return all((directory / _PLANNED.format(rank)).exists() for rank in range(ranks))


def write_metadata(directory: Path, ranks: int) -> None:
    """Make the shares of all ranks a checkpoint, which is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planned, sums = [], {}
    for rank in range(ranks):
        told = directory / _PLANNED.format(rank)
        each, checksums = pickle.loads(told.read_bytes())
        planned.append(each)
        sums.update(checksums)
        told.unlink()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    _, metadata = planner.create_global_plan([each.plan for each in planned])
    metadata.planner_data = {name: path for each in planned for name, path in each.paths.items()}
    writer = FileSystemWriter(directory, sync_files=False)
    writer.finish(metadata, [each.results for each in planned])
    (directory / _CHECKSUMS).write_text(json.dumps({**sums, ".metadata": checksum(directory / ".metadata")}))
    for path in (directory / ".metadata", directory / _CHECKSUMS, directory):
        bring_to_disk(path)


def read(directory: Path) -> dict[str, Any]:
    """Return the values of a checkpoint by name.

    Raises:
        ValueError, OSError: a file is damaged or missing.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    for name, expected in json.loads((directory / _CHECKSUMS).read_text()).items():
        if (got := checksum(directory / name)) != expected:
            raise ValueError(f"checksum and length of {name} are {got}, expected {expected}")
    reader = FileSystemReader(directory)
    found: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        if isinstance(each, TensorStorageMetadata)
        else None
        for name, each in reader.read_metadata().state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


def checksum(path: Path) -> str:
    """Return the CRC-32 and the length of a file."""
    value, length = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
            length += len(chunk)
    return f"{value:08x} {length}"


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
