"""What the ranks of a group on other hosts do, as told by the leader of this host (record_publisher.py)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine.diagnosis.facts import from_json
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.memory.mapping import MemoryFile
from torchestra.engine.multihost.record_publisher import MEMORY_FILE, RemoteHost, RemoteHosts
from torchestra.launcher.open_arenas import PROC
from torchestra.monitor.jobs import Group

_LEADER = 0


class OtherHosts:
    """The other hosts of a group, which are asked again whenever the last answer has come.

    Args:
        group: which has several hosts. If this process is a rank of it, or may not write its arena, the other
            hosts are not asked, and nothing is known of them.
    """

    def __init__(self, group: Group) -> None:
        self._arena = group.arena
        self._header: Any = None if os.getpid() in group.pids else _writable_header(group.arena)
        self._asked = 0
        self._last: tuple[RemoteHost, ...] = ()

    def look(self) -> tuple[RemoteHost, ...]:
        """Return what was told last, and ask anew; nothing if no answer has come yet. Never waits."""
        if self._header is None:
            return ()
        answered = self._arena.load_word(at.RECORDS_ANSWERED)
        if answered >= self._asked:
            if answered and (told := self._read()) is not None:
                self._last = told.hosts
            self._asked = shared_words.increment_and_wake(self._header.ctypes.data + at.RECORDS_ASKED)
        return self._last

    def _read(self) -> RemoteHosts | None:
        """Return what the leader has published; None if it has just published something else, or died."""
        pid, _ = self._arena.process(_LEADER)
        path = Path(PROC, str(pid), "fd", str(self._arena.load_word(at.RECORDS_DESCRIPTOR)))
        with contextlib.suppress(OSError, ValueError, TypeError):
            if MEMORY_FILE in os.readlink(path):
                return from_json(RemoteHosts, path.read_bytes())
        return None


def _writable_header(arena: ForeignArena) -> Any:
    """Map the header of an arena; None if this process may not write it."""
    try:
        descriptor = arena.open_to_write()
    except OSError:
        return None
    try:
        # The mapping stays when the file is closed; one that stayed open would look like a rank's.
        return MemoryFile(descriptor).map(0, at.HEADER_BYTES)
    finally:
        os.close(descriptor)
