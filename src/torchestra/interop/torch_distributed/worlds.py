"""The world of torch.distributed on the ranks of a test or a notebook."""

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
from torchestra.interop.torch_distributed.torch_store import AdoptedStore
from torchestra.store import FileStore, HashStore

_torch: Any = distributed  # whose annotations leave out some names
_c10d: Any = _distributed_c10d
_STORE_TIMEOUT = timedelta(seconds=300)


def serve_gloo(*, by_us: bool = True) -> None:
    """Make torchestra serve "gloo" in this process, without logging that it does; or leave it to Gloo."""
    if not by_us:
        switch.turn_off()
    elif not switch.is_on():
        switch.turn_on(telling=False)


def join_world(rank: int, size: int, timeout_s: float, store: str | Any) -> None:
    """Make torch.distributed's default group, of the backend "gloo". All ranks must call this.

    After :func:`serve_gloo` it runs on torchestra's engine.

    Args:
        timeout_s: how long its operations may wait, in seconds.
        store: where the ranks meet: a store of torch.distributed, or the path of a new file.
    """
    if isinstance(store, str):
        # Over a file of torch's the ranks would have to find out whether they share a host.
        store = AdoptedStore(FileStore(store, size)) if switch.is_on() else _torch.FileStore(store, size)
    _torch.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    if not switch.is_on():
        # Gloo's ranks fail if one that is connected already leaves while others connect.
        _torch.barrier()


def leave_world() -> None:
    """Destroy all groups of torch.distributed on this rank, if there are any."""
    if _torch.is_initialized():
        _torch.destroy_process_group()


def sequence_number() -> int | None:
    """Return how many operations of the default group this rank has called; None without a group."""
    if not _torch.is_initialized():
        return None
    number: int = _torch.group.WORLD._get_sequence_number_for_group()
    return number


def serve_store() -> tuple[Any, int]:
    """Serve a store for ranks that join a world by their environment; return it and its port.

    A thread in C++ serves it as long as the store object lives.
    """
    server = _torch.TCPStore("localhost", 0, None, True, _STORE_TIMEOUT, wait_for_workers=False)
    return server, server.port


def store_environment(port: int, name: str) -> dict[str, str]:
    """Return the variables with which ``init_process_group()`` without arguments meets in a served store.

    They are those of torchrun, whose agent serves a store for its ranks likewise.

    Args:
        port: of the store.
        name: of the world, unique among the worlds that meet in the same store.
    """
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": name,
    }


def shared_store() -> Any:
    """Return a new store for ranks that are threads of this process."""
    return AdoptedStore(HashStore())  # a rank that waits in torch's holds the others up


@contextlib.contextmanager
def worlds_of_threads() -> Iterator[None]:
    """Give every thread its own torch.distributed in the block, as PyTorch's MultiThreadedTestCase does.

    In the block torchestra serves "gloo".

    torch.distributed keeps its groups per process. A part of PyTorch's own test code makes it keep them per
    thread; PyTorch does not promise to keep that code.

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
    # Its records of exceptions go to collectors of all records, such as pytest, and only repeat them.
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
