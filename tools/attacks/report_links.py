"""Links that somebody lays in a directory for all, under the names that reports are written to."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.attacks import Outcome

from torchestra.engine.recorder.trace import write_trace
from torchestra.monitor.report_page import write_page

_TRACE: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ns"}
_PRECIOUS = "what is not to be overwritten"


def attack(seconds: float) -> Outcome:
    """Write reports where links wait."""
    outcome = Outcome()
    until = time.monotonic() + seconds
    while not outcome.tried or time.monotonic() < until:
        for suffix, write in ((".json", write_trace), (".html", _write_page)):
            _try(outcome, suffix, write)
    return outcome


def _write_page(path: Path, trace: dict[str, Any]) -> None:
    write_page(path, [], None)


def _try(outcome: Outcome, suffix: str, write: Callable[[Path, dict[str, Any]], None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        victim, wanted = Path(name, "precious"), Path(name, f"report{suffix}")
        victim.write_text(_PRECIOUS)
        for link in (wanted, Path(f"{wanted}.{os.getpid()}.new"), Path(f"{wanted}.new")):
            link.symlink_to(victim)
            outcome.tried["links"] += 1
        write(wanted, _TRACE)
        held = victim.read_text() == _PRECIOUS
        outcome.expect(held, f"a report ({suffix}) was written through a link")
        outcome.expect(not wanted.is_symlink() and wanted.stat().st_size > 0, "there is no report")
        outcome.refused["links"] += 3 * held
