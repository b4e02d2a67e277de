"""A group's communicator where its ranks are on several hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from torchestra.communicator.communicator import Communicator
from torchestra.engine.kernels.selection import spare_cores
from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost.engine import MultiHostEngine
from torchestra.engine.multihost.hosts import Hosts

__all__ = ["Hosts", "HostsCommunicator", "hosts_of"]

_LOOK_SECONDS, _LONGEST_WAIT = 0.0005, 0.02

_ONE_HOST = Hosts([[0]], [""])


class HostsCommunicator(Communicator):
    """A communicator over an engine in two levels.

    Attributes:
        hosts: which ranks are on which host.
        hierarchy: the engine's means to cross.
        bridge_kind: what is between the hosts, as choose_bridge calls it.
    """

    def __init__(self, engine: MultiHostEngine, name: str, seconds: float) -> None:
        super().__init__(cast(LocalEngine, engine), name, seconds)
        self.hierarchy = engine.hierarchy
        self.bridge_kind = engine.mailbox.bridge_kind
        self.hosts: Hosts = engine.hierarchy.hosts

    @property
    def sent_off(self) -> int:
        """Of how many operations this host has begun to send something."""
        return self.hierarchy.sent_off

    def await_sending(self, sent_off: int) -> None:
        """Where ranks share cores: wait until an operation that was begun beside is sent off, or 20 ms.

        The ranks of a host that have not come to it yet, and the threads that send it, would have to wait for
        this thread's core otherwise, and the network for them. This rank loses nothing by it, for it would
        wait for the same ranks later.

        Args:
            sent_off: what :attr:`sent_off` was before the operation was begun.
        """
        if spare_cores(len(self.hierarchy.here)):
            return
        until = time.monotonic() + _LONGEST_WAIT
        while self.hierarchy.sent_off == sent_off and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)


def hosts_of(communicator: Communicator, ranks: Sequence[int]) -> Hosts:
    """Where some ranks of a group are; any one host will do if they are all on one."""
    return communicator.hosts.among(ranks) if isinstance(communicator, HostsCommunicator) else _ONE_HOST
