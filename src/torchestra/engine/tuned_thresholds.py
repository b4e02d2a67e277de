"""The thresholds that ``torchestra tune`` measured on this machine, kept beside the compiled kernels.

Only the rank that makes a group's arena reads the file, and writes the thresholds into the arena, where all
ranks find them: so ranks with different files, home directories or users agree all the same, and no rank
needs the file. It is read only if nobody but this user and root can have written it; a file that is damaged,
or has thresholds that the kernels cannot use, is ignored, and a line on stderr says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from torchestra.engine.kernels.selection import Choices
from torchestra.engine.native.object_files import open_own, say_once
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.system.cache_directories import candidates, choose, distrust

Table = Mapping[int, Choices]
"""Thresholds by the number of ranks of a group."""

_MAX_BYTES = 1 << 16
_NAMES = tuple(field.name for field in fields(Choices))


def choices_for_group(size: int, buffer_bytes: int) -> Choices:
    """Return the thresholds for a group: those measured for as many ranks, or the defaults."""
    found = table().get(size)
    if found is not None:
        try:
            found.check(buffer_bytes)
            return found
        except InvalidArgumentError as error:
            say_once(f"the thresholds that were measured for {size} ranks are ignored: {error}")
    return Choices.for_group(size, buffer_bytes)


@functools.cache
def table() -> Table:
    """Return the thresholds in the first file that exists; read once per process."""
    for directory in candidates():
        path = directory.folder / file_name()
        if not os.path.lexists(path):
            continue
        try:
            if reason := distrust(directory.folder):
                raise PermissionError(reason)
            return _parsed(_read(path))
        except (OSError, ValueError) as error:
            say_once(f"{path}, which has measured thresholds, is ignored: {error}; torchestra tune writes it")
    return {}


def keep(measured: Table) -> Path:
    """Keep thresholds, as well as those kept for other numbers of ranks; return the file.

    Raises:
        DistBackendError: there is no directory that nobody else can write to.
    """
    directory, refused = choose()
    if directory is None:
        raise DistBackendError(f"no directory can be used to keep thresholds: {'; '.join(refused)}")
    path = directory.folder / file_name()
    known = {str(size): asdict(choices) for size, choices in sorted({**table(), **measured}.items())}
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            json.dump(known, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DistBackendError(f"the thresholds cannot be kept in {path}: {error}") from error
    table.cache_clear()
    return path


def forget() -> list[Path]:
    """Remove the thresholds kept for this machine; return the files that there were."""
    removed = []
    for directory in candidates():
        path = directory.folder / file_name()
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    table.cache_clear()
    return removed


def file_name() -> str:
    """Return the file's name: hosts with other processors may share the directory."""
    machine = f"{platform.machine()} {_processor()} {os.cpu_count()}"
    return f"torchestra-thresholds-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor()


def _read(path: Path) -> str:
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read(_MAX_BYTES).decode()


def _parsed(text: str) -> Table:
    """Return the thresholds in a text. ValueError: it is not what :func:`keep` writes."""
    found: object = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it has no table")
    parsed = {}
    for size, numbers in found.items():
        if not (size.isdecimal() and isinstance(numbers, dict) and set(numbers) == set(_NAMES)):
            raise ValueError(f"for {size} ranks it must have {', '.join(_NAMES)}, and nothing else")
        if not all(type(number) is int for number in numbers.values()):
            raise ValueError(f"for {size} ranks it has a value that is not a whole number")
        parsed[int(size)] = Choices(**numbers)
    return parsed
