"""Find the address at which other hosts reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from torchestra.errors import InvalidArgumentError
from torchestra.store import PrefixStore, Store

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface to use between hosts, as for torch.distributed."""

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # for documentation (RFC 5737): on no network, so beyond every local one
_ANY_PORT = 9
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(store: Store) -> str:
    """Return an address at which others that share the store can reach this host.

    It belongs to the interface that GLOO_SOCKET_IFNAME names; else to the one that leads to the store's
    server, or to one of its replicas; else to the one of the default route. It is loopback where there is no
    other.

    Raises:
        InvalidArgumentError: there is no interface of that name here, or it has no IPv4 address.
    """
    if name := os.environ.get(INTERFACE_VARIABLE):
        try:
            return interface_address(name)
        except OSError as error:
            raise InvalidArgumentError(
                f"{INTERFACE_VARIABLE} is {name!r}: this host has no such interface with an IPv4 address"
            ) from error
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    store = getattr(store, "torch_store", store)
    replicas = [each.rpartition(":")[0].strip("[]") for each in getattr(store, "addresses", ())]
    master = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    for target in (*replicas, master, _ELSEWHERE):
        address = _address_towards(target)
        if address is not None:
            return address
    return _LOOPBACK


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        OSError: there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_INTERFACE_ADDRESS, request)[20:24])


def _address_towards(host: str) -> str | None:
    """Return this host's source address for packets to ``host``; None if loopback or unknown."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the name of a Unix socket may be too long for a host name
        return None
    return None if address.startswith("127.") or address == "::1" else address.partition("%")[0]
