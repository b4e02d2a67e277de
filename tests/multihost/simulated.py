"""Hosts that are simulated: ranks with different host ids share no memory, though they could.

``on_threads((1, 2), fn, *args)`` calls ``fn(*args)`` on three threads, one on host h0 and two on host h1;
:func:`on_processes` does so on processes, with the default bridge between the hosts. Both return what the
ranks returned, and raise a rank's exception, if there is any.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import torchestra as dist
from torchestra.engine.multihost.bridge_selection import BRIDGE_VARIABLE, TRUST_VARIABLE
from torchestra.engine.multihost.host_id import HOST_VARIABLE
from torchestra.store import HashStore, Store, TCPStore
from torchestra.store.secret import SECRET_VARIABLE
from torchestra.world.registry import thread_rank
from worlds import Outcome, ProcessWorld, processes

Layout = tuple[int, ...]
"""How many ranks there are on each host."""

LAYOUTS: tuple[Layout, ...] = ((2, 2), (1, 2, 3))
SECONDS = 60.0


def host_names(layout: Layout) -> list[str]:
    """By rank, the host it is on."""
    return [f"h{host}" for host, ranks in enumerate(layout) for _ in range(ranks)]


def outcomes_on_threads(
    layout: Layout, fn: Callable[..., Any], *args: Any, timeout: float = SECONDS, bridge: str = ""
) -> list[Outcome]:
    """Return how each rank ended. ``bridge``: what is between the hosts, if not memory."""
    names, store = host_names(layout), HashStore()
    ended = [Outcome() for _ in names]

    def body(rank: int) -> None:
        try:
            with thread_rank(rank, len(names), store, names[rank]):
                dist.init_process_group(timeout=timeout)
                ended[rank] = Outcome(fn(*args))
        except BaseException as error:
            ended[rank] = Outcome(error=error)

    with _bridge(bridge):
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return ended


def on_threads(layout: Layout, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return what each rank returned. Options as for :func:`outcomes_on_threads`."""
    return _results(outcomes_on_threads(layout, fn, *args, **options))


@contextmanager
def _bridge(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BRIDGE_VARIABLE, raising=False)
        if name:
            patch.setenv(BRIDGE_VARIABLE, name)
            patch.setenv(TRUST_VARIABLE, "1")
            patch.setenv(SECRET_VARIABLE, "a secret of these tests")
        yield


def on_processes(layout: Layout, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return what each rank returned."""
    with host_processes(layout, fn, *args, **options) as world:
        return _results(world.finish())


@contextmanager
def host_processes(
    layout: Layout, fn: Callable[..., Any], *args: Any, timeout: float = SECONDS, **variables: str
) -> Iterator[ProcessWorld]:
    """Ranks that run while the block does, with these environment variables."""
    with processes(sum(layout), be_on_host, layout, timeout, variables, fn, args, init=False) as world:
        yield world


def be_on_host(
    store: Store,
    rank: int,
    size: int,
    layout: Layout,
    timeout: float,
    variables: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """The life of a process rank."""
    secret = {SECRET_VARIABLE: "a secret of these tests"}
    os.environ.update({HOST_VARIABLE: host_names(layout)[rank], **secret, **variables})
    if rank == 0:
        shared = TCPStore("127.0.0.1", 0, is_master=True)
        store.set("port", str(shared.port))
    else:
        shared = TCPStore("127.0.0.1", int(store.get("port")))
    dist.init_process_group(store=shared, rank=rank, world_size=size, timeout=timeout)
    result = fn(*args)
    dist.barrier()
    left = min(size, dist.get_world_size())  # fewer, if the world has lost ranks
    dist.destroy_process_group()
    store.barrier("end", left)
    shared.close()
    return result


def _results(ended: list[Outcome]) -> list[Any]:
    """Return what the ranks returned; raise an error if there is one, rather a cause than what it led to."""
    errors = {rank: outcome.error for rank, outcome in enumerate(ended) if outcome.error is not None}
    if errors:
        worst = min(errors, key=lambda rank: isinstance(errors[rank], dist.GroupAbortedError))
        if hasattr(errors[worst], "add_note"):
            errors[worst].add_note(f"on rank {worst}; on all: {errors!r}")
        raise errors[worst]
    return [outcome.value for outcome in ended]
