"""The world of torch.distributed on ranks that somebody else has started: a test's, a notebook's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d

from torchestra.errors import NotReadyError
from torchestra.interop import switch

_torch: Any = distributed  # of whose names the annotations leave out some
_c10d: Any = _distributed_c10d
_STORE_TIMEOUT = timedelta(seconds=300)


def serve_gloo() -> None:
    """Have torchestra serve what this process calls "gloo", and say nothing of it."""
    if not switch.is_on():
        switch.turn_on(telling=False)


def join_world(rank: int, size: int, timeout_s: float, store: str | Any) -> None:
    """Make torch.distributed's default group, of the backend "gloo". To be called by all ranks.

    After :func:`serve_gloo` it runs on torchestra's engine.

    Args:
        timeout_s: how long its operations may wait, in seconds.
        store: where the ranks meet: a store of torch.distributed, or the path of a new file.
    """
    if isinstance(store, str):
        store = _torch.FileStore(store, size)
    _torch.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def leave_world() -> None:
    """Destroy all groups of torch.distributed on this rank, if there are any."""
    if _torch.is_initialized():
        _torch.destroy_process_group()


def sequence_number() -> int | None:
    """Return how many operations the default group has seen on this rank; None without a group."""
    if not _torch.is_initialized():
        return None
    number: int = _torch.group.WORLD._get_sequence_number_for_group()
    return number


def serve_store() -> tuple[Any, int]:
    """Serve a store for ranks that join a world by their environment; return it, and its port.

    It is served by a thread in C++ for as long as the store is kept.
    """
    server = _torch.TCPStore("localhost", 0, None, True, _STORE_TIMEOUT, wait_for_workers=False)
    return server, server.port


def store_environment(port: int, name: str) -> dict[str, str]:
    """Return variables by which ``init_process_group()`` without arguments meets in a served store.

    They are those of torchrun, whose agent serves a store for its ranks likewise.

    Args:
        port: of the store.
        name: of the world, another one for each that meets in the same store.
    """
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": name,
    }


def shared_store() -> Any:
    """Return a new store for ranks that are threads of this process."""
    return _torch.HashStore()


@contextlib.contextmanager
def worlds_of_threads() -> Iterator[None]:
    """Give every thread a torch.distributed of its own meanwhile, as PyTorch's MultiThreadedTestCase does.

    Meanwhile torchestra serves "gloo".

    torch.distributed keeps its groups per process. What makes it keep them per thread is a part of PyTorch's
    own test code, without a promise that it stays.

    Raises:
        NotReadyError: this torch has no such part.
    """
    try:
        from torch.testing._internal.distributed import multi_threaded_pg

        install: Callable[[], Any] = multi_threaded_pg._install_threaded_pg
        uninstall: Callable[[], Any] = multi_threaded_pg._uninstall_threaded_pg
        isolate: Callable[[bool], None] = _c10d._set_thread_isolation_mode
    except (ImportError, AttributeError) as error:
        raise NotReadyError(
            f"torch {torch.__version__} has no torch.distributed per thread ({error}): use ranks that are"
            " processes"
        ) from error
    # Its records of what was raised go to whoever collects all records, as pytest does, and only repeat it.
    calls = logging.getLogger("c10d-NullHandler-default")
    disabled, calls.disabled = calls.disabled, True
    served = switch.is_on()
    serve_gloo()
    install()
    isolate(True)
    try:
        yield
    finally:
        if not served:
            switch.turn_off()
        isolate(False)
        calls.disabled = disabled
        uninstall()
