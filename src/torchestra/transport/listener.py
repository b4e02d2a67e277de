"""The port at which a rank listens for those that it expects, and how strangers there are kept few.

ZeroMQ accepts whoever connects, and gives him some seconds to prove his key. So there are no more strangers
than have come within that time: when these are too many, the port is shut until it is over, and for good when
all that are expected have come. A port of ZeroMQ's cannot be closed without its connections. So what is shut
is a filter at the listening socket, by which the kernel drops whatever asks for a connection: that costs no
descriptor, and a rank which is expected asks again of itself.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from torchestra.errors import DistNetworkError

__all__ = ["HANDSHAKE_SECONDS", "Listener"]

HANDSHAKE_SECONDS = 3
"""How long whoever connects has to prove his key."""

_STRANGERS = 64
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)  # the one instruction of the filter: return 0 bytes (BPF_RET)


class Listener:
    """A listening port, for the thread of the connections but for its making.

    Args:
        inbox: the socket of ZeroMQ that shall have the connections.
        address: of this host's interface to listen at.
        ports: the first and the last that may be used, or None for any.

    Attributes:
        endpoint: where it listens, as ZeroMQ writes it.

    Raises:
        DistNetworkError: it cannot listen there.
    """

    def __init__(self, inbox: zmq.Socket[Any], address: str, ports: tuple[int, int] | None) -> None:
        self._expected = 0
        self._shut = self._for_good = False
        self._came: deque[float] = deque()
        self._inbox = inbox
        listening = _listen(address, ports)
        number = listening.getsockname()[1]
        self._port = listening.dup()  # ZeroMQ closes what it is given
        self._events = inbox.get_monitor_socket(zmq.EVENT_ACCEPTED)
        inbox.set(zmq.USE_FD, listening.detach())
        inbox.bind(f"tcp://[{address}]:{number}" if ":" in address else f"tcp://{address}:{number}")
        self.endpoint = str(inbox.getsockopt_string(zmq.LAST_ENDPOINT))

    def expect(self, number: int) -> None:
        """Be ready for so many that come at once."""
        self._expected = number
        self._port.listen(number + _STRANGERS)

    def look(self, *, all_have_come: bool) -> None:
        """Count who has come, and open or shut the port."""
        if self._for_good:
            return
        now = time.monotonic()
        while self._events.poll(0):
            recv_monitor_message(self._events, zmq.NOBLOCK)
            self._came.append(now)
        while self._came and now - self._came[0] > HANDSHAKE_SECONDS:
            self._came.popleft()
        shut = all_have_come or len(self._came) > self._expected + _STRANGERS
        if shut != self._shut:
            self._shut = shut
            self._filter() if shut else self._port.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        if all_have_come:
            self._for_good = True
            self.close()

    def close(self) -> None:
        """Look no more."""
        if not self._events.closed:
            self._inbox.disable_monitor()
            self._events.close(0)
            self._port.close()

    def _filter(self) -> None:
        instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        program = struct.pack("@HP", 1, ctypes.addressof(instructions))
        self._port.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _listen(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            listening = socket.create_server((address, port), family=family, backlog=_STRANGERS)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                where = f"port{'s' if first != last else ''} {first}-{last}" if ports else "any port"
                raise DistNetworkError(f"cannot listen at {address}, {where}: {error}") from error
        else:
            listening.setblocking(False)
            return listening
    raise AssertionError("there is no port in the range")
