"""Ranks on hosts that are network namespaces (tools/chaos/network.py)."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from simulated import SECONDS, Layout
from tools.chaos.network import Network, enter, why_not

import torchestra as dist
from torchestra.store import Store, TCPStore
from worlds import ProcessWorld, leave_note, processes

_SECRET = "a secret of these tests"
_NAMESPACE_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN


def needs_hosts(why_skip: str = "") -> pytest.MarkDecorator:
    """Skip tests where no hosts can be made; have them fail where the process has the rights for it.

    Args:
        why_skip: another reason to skip them.
    """
    why = why_skip or why_no_hosts()
    if why and not why_skip and _may_make_namespaces():
        return pytest.mark.usefixtures("no_hosts_in_spite_of_rights")
    return pytest.mark.skipif(bool(why), reason=why)


@functools.cache
def why_no_hosts() -> str:
    """Return why there can be no hosts; found out once, so that all tests of a process hold to it."""
    return why_not()


def _may_make_namespaces() -> bool:
    with open("/proc/self/status") as status:
        (rights,) = (int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return shutil.which("ip") is not None and rights & _NAMESPACE_CAPABILITIES == _NAMESPACE_CAPABILITIES


@contextmanager
def on_hosts(
    network: Network,
    layout: Layout,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = SECONDS,
    heartbeat: float = 10.0,
    server: bool = False,
) -> Iterator[ProcessWorld]:
    """Ranks that are processes on the hosts of a network, and run ``fn(*args)`` while the block does.

    Args:
        server: the store is in a process of its own, whose id is in the note ``server``.
    """
    names = [network.hosts[host] for host, ranks in enumerate(layout) for _ in range(ranks)]
    arguments = (names, timeout, heartbeat, server, fn, args)
    with processes(len(names), be_on_real_host, *arguments, init=False) as world:
        try:
            yield world
        finally:
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(world.path("server")) as note,
            ):
                os.kill(int(note.read()), signal.SIGKILL)


def serve_store() -> int:
    """Serve a store from a process of its own on this host; the port."""
    program = [sys.executable, "-m", "torchestra.store.tcp", "--host", "10.77.0.1", "--port", "0"]
    made = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    leave_note("server", str(made.pid))
    assert made.stdout is not None
    return int(made.stdout.readline().rpartition(":")[2])


def be_on_real_host(
    store: Store,
    rank: int,
    size: int,
    names: list[str],
    timeout: float,
    heartbeat: float,
    server: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """The life of a rank. The store is in a file, which hosts of this kind share."""
    os.environ.update({"TORCHESTRA_SECRET": _SECRET, "TORCHESTRA_HEARTBEAT": str(heartbeat)})
    enter(names[rank])
    if rank == 0 and server:
        store.set("port", str(serve_store()))
    if rank == 0 and not server:
        shared = TCPStore("10.77.0.1", 0, is_master=True)
        store.set("port", str(shared.port))
    else:
        shared = TCPStore("10.77.0.1", int(store.get("port")))
    dist.init_process_group(store=shared, rank=rank, world_size=size, timeout=timeout)
    result = fn(*args)
    left = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store.barrier("end", left)
    shared.close()
    return result
