"""Ranks that are workers: ``run(kind, size, fn, *args)`` calls ``fn(rank, *args)`` on each of them.

Workers are called worker0, worker1, ... When ``fn`` has returned they shut down, gracefully.

Of the kind "hosts" they are threads that pretend to be on two hosts by turns: neighbours talk over ZeroMQ.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Any

import torchestra as dist
import worlds
from torchestra import rpc

KINDS = (*worlds.KINDS, "hosts")
SECRET = "a secret of the tests"


def begin(rank: int | None = None, **options: Any) -> int:
    """On a rank of worlds.run: make it a worker; its number."""
    rank = dist.get_rank() if rank is None else rank
    directory = os.environ.get("WORLD_DIRECTORY")
    if directory and dist.get_backend() == "native":
        options.setdefault("init_method", f"file://{directory}/rpc")
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=dist.get_world_size(),
            rpc_backend_options=rpc.RpcBackendOptions(**options),
        )
    else:
        rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(**options))
    return rank


def _worker(fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    rank = begin(**options)
    try:
        value = fn(rank, *args)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    return value


def run(
    kind: str, size: int, fn: Callable[..., Any], *args: Any, fresh: bool = False, **options: Any
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every worker; the results. ``fresh`` as ``worlds.py`` has it."""
    if kind == "hosts":
        return worlds.run(
            "threads", size, _worker, fn, args, {"secret": SECRET, **options}, hosts=hosts(size)
        )
    return worlds.run(kind, size, _worker, fn, args, options, fresh=fresh)


def hosts(size: int) -> list[str]:
    """By rank, one of two hosts."""
    return [f"host{rank % 2}" for rank in range(size)]


def first(kind: str, size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``fn(*args)`` on worker 0 alone, while the others answer; the result."""
    return run(kind, size, _only_first, fn, args, **options)[0]


def _only_first(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(*args) if rank == 0 else None


def threads_since(
    before: Collection[threading.Thread], names: tuple[str, ...] = ("rpc-",)
) -> list[threading.Thread]:
    """The threads of workers in this process that run now, without those of ``before``; or of other names."""
    return [each for each in threading.enumerate() if each.name.startswith(names) and each not in before]
