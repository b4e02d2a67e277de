"""Where the launchers of a job meet, and where those that come later find it.

``--rendezvous`` has one address or several: the address with number K is of node K's host. The launchers meet
at the first, which the one of node 0 serves. Once they have met, the launchers of the other addresses listen
there too, and tell whoever comes what the launchers have told each other: the job and its members, among
these where the replicas of the job's store are (see nodes.py). So a launcher that comes later needs only one
of the addresses. One that finds the job at another address than the first never waits for launchers to meet;
neither does the one of node 0 when it is started again, for it looks at the other addresses first.
"""

from __future__ import annotations

import contextlib
import sys
import time

from torchestra.errors import DistError, DistNetworkError, InvalidArgumentError
from torchestra.store import PrefixStore, Store, TCPStore, TCPStoreServer
from torchestra.store.base import interruptible_sleep
from torchestra.store.tcp.address import Address, dial
from torchestra.system.deadline import Deadline

MEET_SECONDS = 600.0
_OWN_SECONDS = 30.0
"""The time for node 0 to reach its own store. If it does not, the address is not that of its host."""
_TRY_SECONDS = 2.0
_RETRY_SECONDS = 0.2
_KEYS = "launchers"
_REPLICAS = "replicas"


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        InvalidArgumentError: the text is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError(f"--rendezvous must be host:port, got {text!r}")
    return host.strip("[]"), int(port)


class LauncherRendezvous:
    """The rendezvous of the launchers of a job, as the launcher of one node sees it.

    Args:
        rendezvous: the addresses, separated by commas.
        replicas: how many nodes are to serve the job's store.
        node: the number of this node.

    Attributes:
        host, port: the first address.
        store: of the launchers; of a job that has begun already, if ``is_begun``, only to be read.
        server: of the store, on node 0 of a job that begins.

    Raises:
        InvalidArgumentError: the addresses make no sense.
        DistNetworkError: none was reached, or this node's is not of this host.
    """

    def __init__(self, rendezvous: str, replicas: int, node: int) -> None:
        self._text, self._node = rendezvous, node
        self._addresses = [Address(*parse_rendezvous(each)) for each in rendezvous.split(",")]
        count = len(self._addresses)
        if len(set(self._addresses)) < count:
            raise InvalidArgumentError(f"--rendezvous has an address twice: {rendezvous}")
        most = max(1, replicas)
        if count > most:
            raise InvalidArgumentError(
                f"--rendezvous has {count} addresses, but the launchers of {most} nodes serve the job's"
                " store: give no more addresses than these"
            )
        self.host, self.port = self._addresses[0].host, self._addresses[0].port
        self.is_begun = False
        self.server: TCPStoreServer | None = None
        self._told: tuple[str, ...] = ()
        self._later_server: TCPStoreServer | None = None
        self.store = self._connected()
        self.store.set_timeout(MEET_SECONDS)

    def _connected(self) -> Store:
        first, others = self._addresses[0], self._addresses[1:]
        if self._node == 0:
            for address in others:
                if _answers(address):
                    return self._begun_at(address)
            self.server = TCPStoreServer(first.host, first.port)
        if not others or self._node == 0:
            limit = MEET_SECONDS if self._node else _OWN_SECONDS
            try:
                return _open(first, limit)
            except DistNetworkError as error:
                self.close()
                raise DistNetworkError(
                    f"{error} (The launcher with --node-rank 0 listens at --rendezvous {first}; is that an"
                    " address of its host?)"
                ) from error
        # No answer of any host, at worst, between two looks at the clock.
        deadline = Deadline(MEET_SECONDS, len(self._addresses) * _TRY_SECONDS + _RETRY_SECONDS)
        while not deadline.expired():
            for address in self._addresses:
                if _answers(address):
                    return _open(address, _OWN_SECONDS) if address == first else self._begun_at(address)
            interruptible_sleep(_RETRY_SECONDS)
        raise DistNetworkError(
            f"node {self._node} has reached no launcher at --rendezvous {self._text} in {MEET_SECONDS:g} s"
        )

    def _begun_at(self, address: Address) -> Store:
        self.is_begun = True
        return _open(address, _OWN_SECONDS)

    def announce(self, members: str) -> None:
        """Once all have met: let those that come later find the job at this node's own address, too.

        Args:
            members: the value of that key of the launchers' store.
        """
        if not self._node < len(self._addresses) or len(self._addresses) == 1 or self.server is not None:
            return
        address, job = self._addresses[self._node], self.store.get("job")
        try:
            self._later_server = TCPStoreServer(address.host, address.port)
            own = _open(address, _OWN_SECONDS)
            own.set("job", job)
            own.set("members", members)
            own.close()
        except DistError as error:
            print(
                f"torchestra run: node {self._node} does not listen at {address} of --rendezvous, so hosts"
                f" that come later do not find the job there: {error}",
                file=sys.stderr,
            )

    def replicas(self) -> list[str]:
        """Return where the replicas of the job's store are, as a launcher has told that serves here."""
        return self.store.get(_REPLICAS).decode().split(",") if self.store.check([_REPLICAS]) else []

    def tell_replicas(self, addresses: tuple[str, ...]) -> None:
        """If this node listens: tell those that come later where the replicas are now."""
        if addresses == self._told or (self.server is None and self._later_server is None):
            return
        self._told = addresses
        address = self._addresses[self._node]
        try:
            own = _open(address, _OWN_SECONDS)
            own.set(_REPLICAS, ",".join(addresses))
            own.close()
        except DistError as error:
            print(
                f"torchestra run: node {self._node} cannot tell at {address} of --rendezvous where the job's"
                f" store is now: {error}",
                file=sys.stderr,
            )

    def close(self) -> None:
        """Stop listening."""
        for server in (self.server, self._later_server):
            if server is not None:
                server.close()


def _open(address: Address, timeout_s: float) -> Store:
    return PrefixStore(_KEYS, TCPStore(address.host, address.port, timeout=timeout_s))


def _answers(address: Address) -> bool:
    with contextlib.suppress(OSError):
        dial(address, time.monotonic() + _TRY_SECONDS, secured=True).close()
        return True
    return False
