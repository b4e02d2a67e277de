"""A pytest test on ranks that are threads of the pytest process."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.interop.rank_world import thread_worlds
from torchestra.testing.item_outcome import conclude
from torchestra.testing.marker import RanksSpec
from torchestra.testing.rank_fixtures import RankFixtures
from torchestra.testing.threads import join_ranks, start_ranks

_OUTPUT_FIXTURES = {"capsys", "capsysbinary", "capfd", "capfdbinary", "capteesys"}


def run_on_threads(item: pytest.Function, spec: RanksSpec) -> None:
    """Call the test function on every rank; raise the exception that the outcomes imply."""
    kind = type(item.instance) if item.cls is not None else None

    def body(rank: int) -> None:
        instance: Any = None if kind is None else kind()
        function = item.function if instance is None else item.function.__get__(instance)
        with RankFixtures(item, rank, instance) as fixtures:
            function(**fixtures.arguments())

    with _outputs_apart(item, spec.size), _logs_named(item), thread_worlds(spec.world) as store:
        threads = start_ranks(spec.size, body, spec.timeout, spec.init, spec.may_die, spec.world, store)
        outcomes = join_ranks(threads, spec.limit)
    conclude(item, outcomes, "threads", spec.limit)


@contextlib.contextmanager
def _outputs_apart(item: pytest.Function, size: int) -> Iterator[None]:
    """Keep the output of each rank for the report; with ``-s``, prefix its lines instead."""
    if _OUTPUT_FIXTURES & set(item.fixturenames):
        yield
        return
    passing = item.config.getoption("capture") == "no"
    streams = {name: _RankStream(getattr(sys, name), passing) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream.original)
            for rank in range(size):
                text = stream.text_of(rank)
                if text and passing:
                    stream.original.write(f"[rank {rank}] {text}\n")
                elif text:
                    item.add_report_section("call", f"{name} of rank {rank}", text)


@contextlib.contextmanager
def _logs_named(item: pytest.Function) -> Iterator[None]:
    """Make pytest's reports of log records name the rank; what tests get from caplog is unchanged."""
    plugin = item.config.pluginmanager.getplugin("logging-plugin")
    handlers = [
        getattr(plugin, name, None) for name in ("report_handler", "log_cli_handler", "log_file_handler")
    ]
    formatters = [(each, each.formatter) for each in handlers if isinstance(each, logging.Handler)]
    for handler, formatter in formatters:
        handler.setFormatter(_RankFormatter(formatter or logging.Formatter()))
    try:
        yield
    finally:
        for handler, formatter in formatters:
            handler.setFormatter(formatter)


class _RankFormatter(logging.Formatter):
    """Formats like another formatter and adds the rank; handlers format in the thread that logs."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        here = current_thread_rank()
        text = self._formatter.format(record)
        return text if here is None else f"[rank {here.rank}] {text}"


class _RankStream(io.TextIOBase):
    """Keeps the output of each rank apart; passes all other output to the original stream."""

    def __init__(self, original: TextIO, passing: bool) -> None:
        self.original = original
        self._passing = passing
        self._texts: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        here = current_thread_rank()
        if here is None:
            return self.original.write(text)
        with self._lock:
            if not self._passing:
                self._texts.setdefault(here.rank, []).append(text)
                return len(text)
            *lines, rest = ("".join(self._texts.get(here.rank, [])) + text).split("\n")
            self._texts[here.rank] = [rest]
            self.original.writelines(f"[rank {here.rank}] {line}\n" for line in lines)
        return len(text)

    def flush(self) -> None:
        if not self.original.closed:  # Python 3.13 flushes discarded streams, even with a closed original
            self.original.flush()

    def text_of(self, rank: int) -> str:
        return "".join(self._texts.get(rank, []))

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.original.encoding
