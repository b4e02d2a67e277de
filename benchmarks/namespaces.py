"""Hosts that are network namespaces, joined by links of a given rate through a switch.

Needs Linux, root, iproute2 and a kernel with veth, bridge and tbf.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

__all__ = ["Namespaces"]

_ADDRESS = "10.79.0.{}"
_BURST = "16kb"
"""What a link that was idle may send at once: little, as on a cable."""


class Namespaces:
    """Some hosts, which exist for a ``with`` block.

    Args:
        number: how many.
        mbit: the rate of each host's link, in each direction, in Mbit/s.

    Attributes:
        names: of the namespaces.
        addresses: of the hosts.
    """

    def __init__(self, number: int, mbit: int) -> None:
        self._switch = f"tqlink{os.getpid()}s"
        self.names = [f"tqlink{os.getpid()}h{host}" for host in range(number)]
        self.addresses = [_ADDRESS.format(host + 1) for host in range(number)]
        self._mbit = mbit

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except BaseException:
            self._delete()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._delete()

    def inside(self, host: int) -> list[str]:
        """Return the words that begin a command on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def _make(self) -> None:
        for name in (self._switch, *self.names):
            _run(f"ip netns add {name}")
        _run(f"ip -n {self._switch} link add bridge type bridge")
        _run(f"ip -n {self._switch} link set bridge up")
        for host, name in enumerate(self.names):
            port = f"port{host}"
            _run(f"ip -n {self._switch} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {self._switch} link set {port} master bridge up")
            _run(f"ip -n {name} address add {self.addresses[host]}/24 dev eth0")
            for device in ("lo", "eth0"):
                _run(f"ip -n {name} link set {device} up")
            for namespace, device in ((name, "eth0"), (self._switch, port)):
                shape = f"rate {self._mbit}mbit burst {_BURST} latency 100ms"
                _run(f"tc -n {namespace} qdisc add dev {device} root tbf {shape}")

    def _delete(self) -> None:
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
