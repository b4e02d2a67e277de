"""A group's communicator where its ranks are on several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torchestra.communicator import Communicator
from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost.engine import MultiHostEngine
from torchestra.engine.multihost.hosts import Hosts

__all__ = ["Hosts", "HostsCommunicator", "hosts_of"]

_ONE_HOST = Hosts([[0]], [""])


class HostsCommunicator(Communicator):
    """A communicator over an engine in two levels.

    Attributes:
        hosts: which ranks are on which host.
    """

    def __init__(self, engine: MultiHostEngine, name: str, seconds: float) -> None:
        super().__init__(cast(LocalEngine, engine), name, seconds)
        self.hosts: Hosts = engine.crossing.hosts


def hosts_of(communicator: Communicator, ranks: Sequence[int]) -> Hosts:
    """Where some ranks of a group are; any one host will do if they are all on one."""
    return communicator.hosts.among(ranks) if isinstance(communicator, HostsCommunicator) else _ONE_HOST
