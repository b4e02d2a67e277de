"""Files of samples of a job: ``torchestra top --record`` writes them, and ``--replay`` shows them again.

A file is a database of SQLite, with a row for each sample, which is JSON compressed by zlib. So one whose
writer was killed can still be read, and so can any sample without those before it.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path

from torchestra.engine.diagnosis.facts import from_json, to_json
from torchestra.errors import InvalidArgumentError
from torchestra.monitor.live.samples import JobSample

_APPLICATION = 0x746F7270  # SQLite's application_id: whose file it is
_VERSION = 1
_MAX_BYTES = 1 << 28  # of a sample
_MEMBERSHIP = {"least", "most", "restarts", "restarted"}  # launcher/membership_file.py
_MEMBER = {"rank", "pid", "state", "since", "last_failure", "restarts"}


class RecordingWriter:
    """A new file of samples.

    Raises:
        InvalidArgumentError: the file is there already, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise InvalidArgumentError(f"--record {path}: the file exists already; choose another name")
        self._path = path
        try:
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA synchronous = OFF")  # it need not outlive a crash of the machine
            self._file.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._file.execute(f"PRAGMA user_version = {_VERSION}")
            self._file.execute("CREATE TABLE samples (number INTEGER PRIMARY KEY, taken REAL, json BLOB)")
        except sqlite3.Error as error:
            raise InvalidArgumentError(f"--record {path}: the file cannot be written: {error}") from error

    def write(self, sample: JobSample) -> None:
        """Add a sample.

        Raises:
            InvalidArgumentError: it cannot be written: the disk is full, say.
        """
        packed = zlib.compress(to_json(sample).encode(errors="replace"), 3)
        try:
            self._file.execute("INSERT INTO samples (taken, json) VALUES (?, ?)", (sample.taken_at, packed))
        except sqlite3.Error as error:
            raise InvalidArgumentError(
                f"--record {self._path}: no more samples can be written: {error}; --replay shows those that"
                " were written before"
            ) from error

    def close(self) -> None:
        """End the file."""
        self._file.close()


class Recording:
    """A file of samples, to be read.

    Attributes:
        times: by ``time.time()``, when each sample was taken.

    Raises:
        InvalidArgumentError: it is not one, or of another version of torchestra, or has no samples.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise InvalidArgumentError(f"--replay {path}: there is no such file")
        try:
            self._file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise InvalidArgumentError(f"--replay {path} cannot be opened: {error}") from error
        try:
            self._numbers, self.times = self._read_index()
        except (sqlite3.Error, TypeError, ValueError) as error:
            self._file.close()
            if isinstance(error, InvalidArgumentError):
                raise
            raise InvalidArgumentError(f"--replay {path}: this is no recording: {error}") from error

    def _read_index(self) -> tuple[list[int], list[float]]:
        (application,) = self._file.execute("PRAGMA application_id").fetchone()
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION:
            raise InvalidArgumentError(f"--replay {self._path}: torchestra top --record has not written this")
        if version != _VERSION:
            raise InvalidArgumentError(
                f"--replay {self._path}: the file has version {version}, and this torchestra reads {_VERSION}"
            )
        rows = self._file.execute("SELECT number, taken FROM samples ORDER BY number").fetchall()
        if not rows:
            raise InvalidArgumentError(f"--replay {self._path}: there are no samples in it")
        return [int(number) for number, _ in rows], [float(taken) for _, taken in rows]

    def sample(self, index: int) -> JobSample:
        """Return a sample, the first being 0.

        Raises:
            InvalidArgumentError: it is damaged.
        """
        query = "SELECT json FROM samples WHERE number = ?"
        try:
            (packed,) = self._file.execute(query, (self._numbers[index],)).fetchone()
            sample = from_json(JobSample, zlib.decompressobj().decompress(packed, _MAX_BYTES))
            _check(sample)
        except (sqlite3.Error, zlib.error, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidArgumentError(
                f"--replay {self._path}: sample {index + 1} of {len(self.times)} is damaged: {error}"
            ) from error
        return sample

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _check(sample: JobSample) -> None:
    """Refuse a sample whose parts do not fit together, by a ValueError."""
    membership = json.loads(sample.membership)
    members = [] if membership is None else membership["members"]
    if any(_MEMBER - each.keys() for each in members) or (members and _MEMBERSHIP - membership.keys()):
        raise ValueError("its membership is none")
    for group in sample.groups:
        record, ranks = group.record, group.record.ranks
        sizes = {len(ranks), len(group.alive), len(group.lines), len(group.processes)}
        if len(sizes) > 1 or any(len(rank.waited_for) != record.size for rank in ranks):
            raise ValueError(f"group {record.group!r} has not as many values as ranks")
        peers = (*(rank.rank for rank in ranks), *(rank.waiting_for or 0 for rank in ranks))
        if not all(0 <= rank < record.size for rank in peers):
            raise ValueError(f"group {record.group!r} has no such rank")
