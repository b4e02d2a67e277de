"""Messages between the launcher, its fork server and the ranks: a pickle, and open files with it.

All three are one program on one host, connected by socket pairs that only they hold, so pickles are
safe here. Sockets are SOCK_SEQPACKET: one send is one message, and its files arrive with it. A message
too long for one packet is sent in an anonymous memory file.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

from torchestra.errors import DistBackendError
from torchestra.system.limits import no_descriptors
from torchestra.system.memory_files import make_memory_file

_INLINE = b"i"
_IN_FILE = b"f"
_LONGEST_PACKET = 60_000
_MAX_FILES = 16


class Message(NamedTuple):
    """An object from :func:`receive`, and the descriptors sent with it, which the receiver now owns."""

    content: Any
    files: list[int]


def channel() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends for :func:`send` and :func:`receive`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def anonymous_file() -> BinaryIO:
    """Return a new file without a name, so that nothing is left of it whichever process is killed."""
    return os.fdopen(make_memory_file("torchestra-message"), "w+b")


def send(end: socket.socket, content: object, files: Sequence[int] = ()) -> None:
    """Send ``content`` (anything that pickles) and copies of the open ``files``.

    Raises:
        OSError: the other end is gone.
    """
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    if len(data) <= _LONGEST_PACKET:
        socket.send_fds(end, [_INLINE, data], list(files))
        return
    with anonymous_file() as file:
        file.write(data)
        file.flush()
        socket.send_fds(end, [_IN_FILE], [*files, file.fileno()])


def receive(end: socket.socket) -> Message | None:
    """Return the next message, or None when the other end is closed or its process is gone.

    Raises:
        DistBackendError: this process cannot open any more files, or a message cannot be read.
    """
    try:
        packet, files, flags, _ = socket.recv_fds(end, _LONGEST_PACKET + 1, _MAX_FILES)
    except ConnectionError:
        return None
    # Python before 3.12 passes no flags on to the kernel, so not MSG_CMSG_CLOEXEC.
    for descriptor in files:
        os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:
        for descriptor in files:
            os.close(descriptor)
        raise no_descriptors("files that came with a message between the launcher and its ranks were lost")
    if not packet:
        return None
    try:
        if packet[:1] == _INLINE:
            return Message(pickle.loads(packet[1:]), files)
        if packet != _IN_FILE or not files:
            raise ValueError(f"it begins with {packet[:20]!r}, and {len(files)} files came with it")
        with os.fdopen(files.pop(), "rb") as file:
            file.seek(0)
            return Message(pickle.load(file), files)
    except Exception as error:
        for descriptor in files:
            os.close(descriptor)
        raise DistBackendError(
            f"a message between the launcher and its ranks cannot be read ({type(error).__name__}:"
            f" {error!s:.200}): has the program of a rank written to a descriptor that is not its own?"
        ) from error
