"""How a rank enters a group: the engine is started, and the other ranks are met."""

from __future__ import annotations

import threading

from torchestra.communicator import Communicator
from torchestra.engine import warm_up
from torchestra.engine.joining import join
from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost.finding import find_hosts, may_span_hosts
from torchestra.engine.multihost.hosts import Hosts
from torchestra.engine.multihost.joining import join_hosts
from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.fake import FakeCommunicator
from torchestra.hosts import HostsCommunicator
from torchestra.quick import QuickCommunicator
from torchestra.store import PrefixStore, Store
from torchestra.thread_ranks import current_thread_rank

BACKENDS = ("native", "threads", "fake")


def choose_backend(backend: str | None) -> str:
    """``"native"`` (ranks are processes), ``"threads"`` or ``"fake"``; for None, what the calling rank is.

    Raises:
        InvalidArgumentError: there is no such backend.
    """
    if backend is None:
        return "native" if current_thread_rank() is None else "threads"
    if not isinstance(backend, str):
        raise InvalidArgumentTypeError(f"backend must be a str, got {backend!r}")
    chosen = backend.lower().removeprefix("cpu:")
    if chosen not in BACKENDS:
        raise InvalidArgumentError(
            f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}, and None to pick"
        )
    return chosen


def start(
    store: Store,
    rank: int,
    size: int,
    name: str | None,
    seconds: float,
    backend: str,
    program: threading.Thread | None = None,
    hosts: Hosts | None = None,
) -> Communicator:
    """Enter a group; returns when all ranks have.

    Args:
        store: what the ranks of the group share.
        name: of the group. One without a name gets it from how many this rank has made over the store,
            which is the same number on every rank.
        seconds: how long to wait for the others, and later for their operations.
        backend: as :func:`choose_backend` gives it.
        program: the thread that the rank's program runs in; default: the one that calls.
        hosts: where the ranks are, if that is known; else it is found out.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that did not.
    """
    if name is None:
        name = f"direct-{store.add(f'torchestra/made/{rank}', 1)}"
    if backend == "fake":
        return FakeCommunicator(rank, size, name, seconds)
    warm_up()
    if program is None and (here := current_thread_rank()) is not None:
        program = here.thread
    own = PrefixStore(f"group/{name}", store)
    threads = backend == "threads"
    if hosts is None and may_span_hosts(own, size):
        hosts = find_hosts(own, rank, size, name, seconds, threads=threads)
    if hosts is not None and len(hosts) > 1:
        engine = join_hosts(own, hosts, rank, name, seconds, threads=threads, thread=program)
        return HostsCommunicator(engine, name, seconds)
    member = join(own, rank, size, name, seconds, threads=threads, thread=program)
    return QuickCommunicator(LocalEngine(member), name, seconds)
