"""Hosts that are network namespaces: they reach each other through cables (veth) and a switch (bridge) only.

Sockets of one are not seen in another, so ranks in different ones cannot share an arena, as on machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simulated import SECONDS, Layout

import torchestra as dist
from torchestra.store import Store, TCPStore
from worlds import ProcessWorld, leave_note, processes

_CLONE_NEWNET = 0x40000000
_SECRET = "a secret of these tests"
_numbers = itertools.count()


def why_not() -> str:
    """Return why there cannot be such hosts here; empty if there can."""
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is not installed"
    name = f"tq{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """Some hosts and the switch between them.

    Attributes:
        hosts: the names of their namespaces; host h has address 10.77.0.(h + 1).
    """

    def __init__(self, number: int) -> None:
        tag = f"tq{os.getpid()}x{next(_numbers)}"
        self.hosts = [f"{tag}h{host}" for host in range(number)]
        self._switch = f"{tag}s"
        self._made: list[str] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for name in (self._switch, *self.hosts):
            ip("netns", "add", name)
            self._made.append(name)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.hosts):
            cable = ("link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self._switch, *cable)
            ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self, host: int) -> None:
        """Pull the plug of a host out of the switch."""
        ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def restore(self, host: int) -> None:
        """Put it in again."""
        ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def close(self) -> None:
        for name in self._made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        self._made.clear()


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
        yield world


def enter(name: str) -> None:
    """Have this process be on a host from now on."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


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
