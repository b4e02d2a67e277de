"""Locality: this host's addresses, and the owners of connections; a store without a secret relies on them.

Without a secret a store is for the processes of one user on one host. Addresses tell the host, see
:func:`is_own`; the kernel tells the user: of a Unix socket by ``SO_PEERCRED``, of a TCP connection within
the host by ``sock_diag`` (as shown by ``ss -e``), which knows the owner of either end.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any

CLOSED = -1
"""In place of a user id: the process at that end of the connection has closed it."""

_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_ANY_PORT = 9

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ESTABLISHED = 1
_HEAD = struct.Struct("=IHHII")
_ERROR = 2
_QUERY = struct.Struct("=BBBxI")
_NO_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# family, state, two bytes, the four words of identity and cookie (48 bytes), three words, and the user.
_ANSWER = struct.Struct("=BB2x48x3II")


def is_loopback(where: Any) -> bool:
    """Return whether a socket address (of TCP) is reached from this host only."""
    address = ipaddress.ip_address(where[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_unspecified(where: Any) -> bool:
    """Return whether a socket address means every interface."""
    return ipaddress.ip_address(where[0].partition("%")[0]).is_unspecified


def is_own(family: int, where: Any) -> bool:
    """Return whether a socket address is one of this host's: packets to it would also be sent from it.

    The check sends nothing.
    """
    if is_loopback(where) or is_unspecified(where):
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where[0], _ANY_PORT, *where[2:]))
            return bool(probe.getsockname()[0] == where[0])
    except OSError:
        # There is no route to it, or (IPv6 may be switched off) to any such address.
        return False


def loopback_of(family: int, where: Any) -> Any:
    """Return the same port on the loopback interface; a loopback address is returned as it is."""
    return where if is_loopback(where) else (_LOOPBACK[socket.AddressFamily(family)], *where[1:2])


def peer_user(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a connection within this host.

    Returns:
        None if the kernel does not tell, as for a connection to another host. :data:`CLOSED` if
        the other end is closed already.
    """
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    mine, theirs = connection.getsockname(), connection.getpeername()
    try:
        user = _owner(connection.family, theirs, mine)
        if user is not None:
            return user
        # A kernel without sock_diag for TCP finds nothing at all, not even this end, which surely exists.
        return None if _owner(connection.family, mine, theirs) is None else CLOSED
    except OSError:
        return None


def _owner(family: int, end: Any, other: Any) -> int | None:
    """Return the user of the TCP socket with these addresses; CLOSED if closing, None if there is none."""
    ports = struct.pack("!HH", end[1], other[1])
    addresses = [
        socket.inet_pton(family, host[0].partition("%")[0]).ljust(16, b"\0") for host in (end, other)
    ]
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ports + b"".join(addresses) + _NO_COOKIE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(_HEAD.pack(_HEAD.size + len(query), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + query)
        answer = netlink.recv(4096)
    if len(answer) < _HEAD.size + _ANSWER.size or _HEAD.unpack_from(answer)[1] == _ERROR:
        return None
    _, state, *_, user = _ANSWER.unpack_from(answer, _HEAD.size)
    # For a socket that its process has closed, the kernel reports user 0.
    return int(user) if state == _ESTABLISHED else CLOSED
