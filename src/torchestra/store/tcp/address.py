"""The address of a store: TCP, or a Unix socket without a file.

``unix:@name`` is Linux's abstract Unix socket: a name in the kernel, gone with the process that bound
it, however that ends, and open to processes of the same user only (the kernel tells the peer's user). It
serves ranks that are known to share a host.

Without a secret, TCP stays within the host: any name of this host means its loopback interface, for the
server as for clients, and another host's name is refused. So ranks on one host may use any of its names, and
the server is never reachable from outside.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from torchestra.errors import DistNetworkError, InvalidArgumentError, shown
from torchestra.store.base import check_integer, interpreter_slice
from torchestra.store.secret import SECRET_ADVICE, SECRET_VARIABLE
from torchestra.store.tcp.locality import is_loopback, is_own, is_unspecified, loopback_of, peer_user

_BACKLOG = 4096
_UNIX = "unix:@"
_LONGEST_UNIX = 107 + len("unix:@") - 1  # sun_path has room for as many bytes and the NUL


def _can_be_looked_up(host: str) -> bool:
    """Return whether ``getaddrinfo`` can look up a host; its answers for other texts are meaningless."""
    if host.startswith(_UNIX):
        return "\0" not in host and len(host.encode(errors="replace")) <= _LONGEST_UNIX
    try:
        return bool(host) and "\0" not in host and bool(host.encode("idna"))
    except UnicodeError:
        return False


@dataclass(frozen=True)
class Address:
    """A host name or interface with a port; or ``unix:@name``, with port 0."""

    host: str
    port: int

    @classmethod
    def checked(cls, host: str, port: int, *, listening: bool) -> Address:
        """Return an address from a user's arguments.

        Raises:
            InvalidArgumentError: the host is not a name, or the port not one of 0 to 65535 (0 only where
                the server chooses one).
        """
        if not isinstance(host, str) or not _can_be_looked_up(host):
            raise InvalidArgumentError(
                f"the host of a TCPStore (TCPStore: `host_name`) must be a name or an address, got"
                f" {shown(host)}"
            )
        port = check_integer("port", port)
        if host.startswith(_UNIX):
            return cls(host, 0)
        if not 0 <= port <= 65535:
            raise InvalidArgumentError(f"TCPStore: port must have a value from 0 to 65535, got {shown(port)}")
        if port == 0 and not listening:
            raise InvalidArgumentError("port 0 lets a server choose; a client needs the port that it chose")
        return cls(host, port)

    @property
    def is_unix(self) -> bool:
        return self.host.startswith(_UNIX)

    def resolved(self) -> list[tuple[int, Any]]:
        """Return the family and socket address of each way to reach it, IPv4 first."""
        if self.is_unix:
            return [(socket.AF_UNIX, "\0" + self.host[len(_UNIX) :])]
        infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        pairs = dict.fromkeys((int(family), address) for family, _, _, _, address in infos)
        return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)

    def reached(self, *, secured: bool) -> list[tuple[int, Any]]:
        """Return the permitted ways to reach it: all, or without a secret those within this host.

        Raises:
            OSError: the name is unknown.
            DistNetworkError: there is no secret, and it is on another host.
        """
        ways = self.resolved()
        if secured or self.is_unix:
            return ways
        near = [(family, loopback_of(family, where)) for family, where in ways if is_own(family, where)]
        if not near:
            raise DistNetworkError(
                f"TCPStore({self}) is on another host, and there is no secret: without one, a store is "
                f"reached from its own host only; {SECRET_ADVICE}"
            )
        return list(dict.fromkeys(near))

    @property
    def is_local(self) -> bool:
        """Return whether all its addresses are loopback ones, so that it cannot mean another host."""
        with contextlib.suppress(OSError):
            return self.is_unix or all(is_loopback(where) for _, where in self.resolved())
        return False

    @property
    def _is_name(self) -> bool:
        """Return whether it is the name of a host, not a number and not ``localhost``."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return not self.is_unix and not self.host.startswith(("localhost", "ip6-localhost"))
        return False

    def __str__(self) -> str:
        if self.is_unix:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(address: Address, *, secured: bool) -> socket.socket:
    """Return a socket that listens on the interface that ``address`` names, and on no other.

    Args:
        address: where to listen.
        secured: clients have to prove a secret. If not, the socket is on the loopback interface. If so, it
            listens on all interfaces for a host that is known but is not an address of this machine (a load
            balancer's, a container's outer one), or whose name means the loopback interface on this host
            only (as Debian sets up a host's own name).

    Raises:
        DistNetworkError: the port is in use, the host is not this one, or ``address`` means every interface
            and there is no secret; the message says what to do.
    """
    try:
        family, where = address.resolved()[0]
        if not secured and not address.is_unix:
            where = _within_host(address, family, where)
        if secured and address._is_name and is_loopback(where):
            return _bound(family, _everywhere(family, address))
        return _bound(family, where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise DistNetworkError(
                f"TCPStore cannot listen on {address}: the address is already in use, by another job or by "
                "another master of this one; choose a free port (MASTER_PORT), or 0 to have one chosen"
            ) from error
        if error.errno != errno.EADDRNOTAVAIL or not secured:
            raise DistNetworkError(f"TCPStore cannot listen on {address}: {error.strerror}") from error
    return _bound(family, _everywhere(family, address))


def _within_host(address: Address, family: int, where: Any) -> Any:
    """Return where to listen without a secret."""
    if is_unspecified(where):
        raise DistNetworkError(
            f"TCPStore cannot listen on {address}, which is every interface, without a secret; "
            f"{SECRET_ADVICE}, or listen on 127.0.0.1"
        )
    if not is_own(family, where):
        raise DistNetworkError(
            f"TCPStore cannot listen on {address}: that is not an address of this host; run the master "
            f"there, or set {SECRET_VARIABLE} on all ranks to let it listen on every interface"
        )
    return loopback_of(family, where)


def _everywhere(family: int, address: Address) -> tuple[str, int]:
    return "" if family == socket.AF_INET else "::", address.port


def _bound(family: int, where: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def dial(address: Address, deadline: float, *, secured: bool) -> socket.socket:
    """Try once to connect, to the first of the host's addresses that answers.

    Raises:
        OSError: nobody listens, the name is unknown, or the deadline has passed.
        DistNetworkError: as for :meth:`Address.reached`.
    """
    ways = address.reached(secured=secured)
    for number, (family, where) in enumerate(ways, 1):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            _connect(connection, where, deadline)
            tune(connection)
            if family == socket.AF_UNIX and peer_user(connection) != os.geteuid():
                raise OSError(errno.EACCES, "the server belongs to another user")
            return connection
        except BaseException as error:
            connection.close()
            if number == len(ways) or not isinstance(error, OSError):
                raise
    raise OSError(errno.EADDRNOTAVAIL, "the host has no address")


def _connect(connection: socket.socket, where: Any, deadline: float) -> None:
    connection.setblocking(False)
    code = connection.connect_ex(where)
    while code in (errno.EINPROGRESS, errno.EALREADY):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if wait_ready(connection, select.POLLOUT, remaining):
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            break
    if (
        code == 0
        and connection.family != socket.AF_UNIX
        and connection.getsockname() == connection.getpeername()
    ):
        # TCP lets a socket connect to itself if nobody listens on a port of the ephemeral range.
        code = errno.ECONNREFUSED
    if code:
        raise OSError(code, os.strerror(code))


def wait_ready(connection: socket.socket, events: int, remaining: float) -> bool:
    """Wait a short while, at most ``remaining`` seconds, for ``POLLIN`` or ``POLLOUT``, or a failure."""
    if connection.fileno() < 0:
        raise OSError(errno.EBADF, "the connection was closed")
    poller = select.poll()
    poller.register(connection, events)
    return bool(poller.poll(interpreter_slice(remaining) * 1000))


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice eventually when the other host vanishes."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
