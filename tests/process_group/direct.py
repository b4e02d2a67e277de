"""Groups that are made directly from a store, for the tests of a group's own methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchestra as dist
from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.store import Store
from worlds import outcomes, run

SECONDS = 30.0


def run_direct(kind: str, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``body(group, *args)`` on every rank, with a group made directly and no default group."""
    return run(kind, size, *_call(kind, body, args), init=False)


def outcomes_direct(kind: str, size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """:func:`run_direct`, but how each rank ended."""
    return outcomes(kind, size, *_call(kind, body, args), init=False)


def _call(kind: str, body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_thread, body, *args) if kind == "threads" else (_process, body, *args)


def _thread(body: Callable[..., Any], *args: Any) -> Any:
    here = current_thread_rank()
    assert here is not None
    return _in_group(here.store, here.rank, here.size, body, *args)


def _process(store: Store, rank: int, size: int, body: Callable[..., Any], *args: Any) -> Any:
    return _in_group(store, rank, size, body, *args)


def _in_group(store: Store, rank: int, size: int, body: Callable[..., Any], *args: Any) -> Any:
    group = dist.ProcessGroup(store, rank, size, SECONDS)
    try:
        assert not dist.is_initialized()
        return body(group, *args)
    finally:
        group.destroy()
