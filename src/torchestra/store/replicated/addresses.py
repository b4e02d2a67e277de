"""Where the replicas of a store are: those with which it began, and those that have replaced lost ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchestra.errors import InvalidArgumentError
from torchestra.store.tcp.address import Address


class Addresses:
    """The addresses of a store's replicas by index, for all of a process's clients; any thread may use it.

    Args:
        addresses: each as ``host:port``.

    Raises:
        InvalidArgumentError: there are none, one is twice there, or one is no address.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._known = 0, tuple(parse_addresses(addresses))

    def update(self, version: int, addresses: Sequence[str]) -> None:
        """Take the addresses that a replica has told, unless later ones are known.

        Args:
            version: how many replicas had been replaced then.

        Raises:
            InvalidArgumentError: they are no addresses, or of more or fewer replicas.
        """
        if len(addresses) != len(self):
            raise InvalidArgumentError(f"{len(addresses)} addresses, of {len(self)} replicas")
        told = version, tuple(parse_addresses(addresses))
        if version > self._known[0]:
            self._known = told

    def __len__(self) -> int:
        return len(self._known[1])

    def __getitem__(self, index: int) -> Address:
        return self._known[1][index]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._known[1])


def parse_addresses(addresses: Sequence[str]) -> list[Address]:
    """Return the addresses of replicas, each given as ``host:port``.

    Raises:
        InvalidArgumentError: there are none, one is twice there, or one is no address.
    """
    if isinstance(addresses, str) or not addresses:
        raise InvalidArgumentError(f"replicas are given as a list of host:port, got {addresses!r}")
    parsed = [parse_address(text) for text in addresses]
    if len(set(parsed)) < len(parsed):
        raise InvalidArgumentError(f"every replica needs an address of its own, got {list(addresses)}")
    return parsed


def parse_address(text: str) -> Address:
    """Return the address of a replica.

    Raises:
        InvalidArgumentError: it is not ``host:port``.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgumentError(f"the address of a replica must be host:port, got {text!r}")
    return Address.checked(host.strip("[]"), int(port), listening=False)
