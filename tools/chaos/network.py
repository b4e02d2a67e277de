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

_CLONE_NEWNET = 0x40000000
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


def why_no_netem() -> str:
    """Return why packets cannot be lost and delayed here, where there can be hosts; empty if they can."""
    name = f"tq{os.getpid()}try"
    ip("netns", "add", name)
    try:
        words = ("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "loss", "1%")
        tried = subprocess.run(words, capture_output=True, check=False, text=True)
    except FileNotFoundError:
        return "the program tc (iproute2) is not installed"
    finally:
        ip("netns", "delete", name)
    return f"the kernel has no netem: {tried.stderr.strip()}" if tried.returncode else ""


def ip(*words: str) -> None:
    """Run iproute2's program."""
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

    def cut_between(self, one: int, other: int) -> None:
        """Cut two hosts off from each other; the others reach both."""
        for host in (one, other):
            self._isolate(host, "on")

    def restore_between(self, one: int, other: int) -> None:
        """End that."""
        for host in (one, other):
            self._isolate(host, "off")

    def _isolate(self, host: int, how: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{host}", "type", "bridge_slave", "isolated", how)

    def shape(self, host: int, how: str) -> None:
        """Delay or lose packets to a host: a queueing discipline in the words of tc."""
        port = ["tc", "-n", self._switch, "qdisc", "replace", "dev", f"port{host}", "root"]
        subprocess.run([*port, *how.split()], check=True)

    def unshape(self, host: int) -> None:
        """End that."""
        subprocess.run(["tc", "-n", self._switch, "qdisc", "del", "dev", f"port{host}", "root"], check=True)

    def close(self) -> None:
        """Remove all."""
        for name in self._made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        self._made.clear()


def enter(name: str) -> None:
    """Have this process be on a host from now on."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)
