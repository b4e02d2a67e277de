"""A page of torch's debug server (``torch.distributed.debug``) with torchestra's operations.

torch's own page of the flight recorder asks each rank for what torch's recorder has, which does not know
torchestra's operations, and whose place cannot be taken. So this page has another address. The server's
process reads the record from outside, as ``torchestra report`` does, and torch's analyser makes the tables;
that also works while the ranks hang.
"""

from __future__ import annotations

import ctypes
import json
import os
from types import FunctionType
from typing import Any

from torch.distributed.debug import _handlers
from torch.distributed.debug._debug_handlers import FlightRecorderHandler, default_handlers
from torch.distributed.debug._frontend import NavLink, Response, Route

from torchestra.engine.memory.foreign import ForeignArena
from torchestra.engine.memory.mapping import close, open_to_read
from torchestra.engine.recorder.flight_record import FlightRecord, read_flight_record
from torchestra.engine.recorder.formats.pytorch import dumps_of_worlds
from torchestra.engine.recorder.formats.rows import table_of
from torchestra.engine.recorder.trace import trace_of
from torchestra.launcher.open_arenas import open_arenas

_OK = 200


def _keep_handlers() -> None:
    """Never release torch's handlers in Python.

    torch has them in a table of C++ that is destroyed when the process ends, after the interpreter. To
    release the last reference to a function then is a fatal error (SIGABRT).
    """
    for each in vars(_handlers).values():
        if isinstance(each, FunctionType):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


_keep_handlers()


class OperationsPage(FlightRecorderHandler):
    """Shows the operations of the ranks on the host of the rank that has made this, as tables and as JSON.

    It travels to the server's process by pickle.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def routes(self) -> list[Route]:
        return [Route("/torchestra", self._tables), Route("/torchestra_json", self._json)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink("/torchestra", "torchestra FlightRecorder"), NavLink("/torchestra_json", "(JSON)")]

    def dump(self) -> str | None:
        return "\n".join(response.text for response in self._responses()[1])

    def dump_filename(self) -> str:
        return "torchestra"

    def _tables(self, request: Any) -> bytes:
        return self._render_tables(request.frontend, *self._responses())

    def _json(self, request: Any) -> bytes:
        addresses, responses = self._responses()
        page: bytes = request.frontend.render_template(
            "json_resp.html", title="torchestra FlightRecorder", addrs=addresses, resps=responses
        )
        return page

    def _responses(self) -> tuple[list[str], list[Response]]:
        """Return what a server on each rank would answer, if they had one."""
        table = table_of(trace_of(_records(self._pid)))
        _, dumps = next(dumps_of_worlds(table), ("", {}))
        world = max(table.groups, key=lambda group: group.size, default=None)
        addresses = [f"pid {world.pids.get(rank, 'unknown')}" for rank in dumps] if world is not None else []
        return addresses, [Response(_OK, json.dumps(dump)) for dump in dumps.values()]


def pages() -> list[Any]:
    """Return torch's pages, and this one."""
    return [*default_handlers(), OperationsPage()]


def _records(pid: int) -> list[FlightRecord]:
    """Return the records of a process's groups, and of all others of the ranks in them, on this host."""
    everywhere = list(open_arenas())
    own = {arena.key for arena in everywhere if arena.pid == pid}
    ranks = {arena.pid for arena in everywhere if arena.key in own}
    records = []
    for path in {arena.key: arena.path for arena in everywhere if arena.pid in ranks}.values():
        try:
            descriptor = open_to_read(path)
        except OSError:
            continue  # the process has just ended
        try:
            records.append(read_flight_record(ForeignArena(descriptor)))
        finally:
            close(descriptor)
    return records
