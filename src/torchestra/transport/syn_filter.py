"""A filter on a listening socket, with which the kernel drops requests for connections (BPF).

While the port's queue is crowded the filter lets through all requests that come from known source ports,
and only a share of the others, by chance. The share halves as long as the queue stays crowded, and doubles
when it is not, so known ranks find room however many strangers ask. It drops nothing but such requests: the
connections that are accepted inherit it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Collection

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
_LOAD_HALF, _LOAD_BYTE, _LOAD_WORD, _AND = 0x28, 0x30, 0x20, 0x54
_JUMP_EQUAL, _RETURN = 0x15, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_SOURCE_PORT, _FLAGS = 0, 13  # where they are in the header of TCP
_SYN, _SYN_AND_ACK = 0x02, 0x12
_PASS = 0xFFFFFFFF
_MOST_PORTS = 1500  # a filter has room for 4,096 instructions
_LEAST_SHARE = 12  # as a power of 1/2
_HARDER_SECONDS, _SOFTER_SECONDS = 0.01, 0.05
_LISTEN_INFO = struct.Struct("=24xII")  # struct tcp_info of a listening socket: how many wait, and its room
_CROWDED = 0.5

_Program = list[tuple[int, int, int, int]]


class SynFilter:
    """The filter of one listening socket; for one thread.

    Args:
        listening: the socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._halvings = 0
        self._known: Collection[int] = ()
        self._changed = 0.0

    def adapt(self, known: Collection[int]) -> None:
        """Look how crowded the queue is, and filter as much as that takes.

        Args:
            known: the source ports that may always connect; another object whenever they change.
        """
        now, halvings = time.monotonic(), self._halvings
        if self._is_crowded():
            if now - self._changed >= _HARDER_SECONDS:
                halvings = min(halvings + 1, _LEAST_SHARE)
        elif halvings and now - self._changed >= _SOFTER_SECONDS:
            halvings -= 1
        if halvings == self._halvings and (not halvings or known is self._known):
            return
        self._halvings, self._known, self._changed = halvings, known, now
        if halvings:
            self._attach(_crowded_program(known, halvings))
        else:
            self._listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def drop_all(self) -> None:
        """Let no more requests through."""
        self._attach([(_RETURN, 0, 0, 0)])

    def _is_crowded(self) -> bool:
        info = self._listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LISTEN_INFO.size)
        if len(info) < _LISTEN_INFO.size:
            return False
        waiting, room = _LISTEN_INFO.unpack(info)
        return bool(waiting > _CROWDED * room)

    def _attach(self, instructions: _Program) -> None:
        code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(instructions), ctypes.addressof(memory))
        self._listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _crowded_program(known: Collection[int], halvings: int) -> _Program:
    """Return the filter that lets through what is no request, known ports, and one of 2**halvings others."""
    program = [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_AND_ACK),
        (_JUMP_EQUAL, 1, 0, _SYN),
        (_RETURN, 0, 0, _PASS),
        (_LOAD_HALF, 0, 0, _SOURCE_PORT),
    ]
    for port in sorted(known)[:_MOST_PORTS]:
        program += [(_JUMP_EQUAL, 0, 1, port), (_RETURN, 0, 0, _PASS)]
    program += [
        (_LOAD_WORD, 0, 0, _RANDOM),
        (_AND, 0, 0, (1 << halvings) - 1),
        (_JUMP_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _PASS),
        (_RETURN, 0, 0, 0),
    ]
    return program
