"""The frames that come to a rank, received directly from libzmq.

pyzmq checks for signals after it has received a frame, and a Ctrl-C at that moment loses the frame. Here
receiving is one call of libzmq, which checks for none: the frame then lies in memory of the inbox, and stays
there until :meth:`Inbox.release`, which is one call too. So whatever interrupts a thread that receives, the
next thread that does finds the frame, or finds that it has been handled.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import zmq

_MESSAGE_BYTES = 64  # sizeof(zmq_msg_t)
_SOURCE_DESCRIPTOR = 2  # ZMQ_SRCFD
_READ_ONLY = 0x100  # PyBUF_READ

# The library that pyzmq has loaded: looked up by way of pyzmq's own module, wherever that has it from. No
# call made here waits, so all keep the interpreter's lock.
_libzmq = ctypes.PyDLL(str(import_module("zmq.backend.cython._zmq").__file__))
_receive = _libzmq.zmq_msg_recv
_receive.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_move = _libzmq.zmq_msg_move
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_init, _size, _data = _libzmq.zmq_msg_init, _libzmq.zmq_msg_size, _libzmq.zmq_msg_data
_init.argtypes = _size.argtypes = _data.argtypes = (ctypes.c_void_p,)
_size.restype, _data.restype = ctypes.c_size_t, ctypes.c_void_p
_property, _text = _libzmq.zmq_msg_get, _libzmq.zmq_msg_gets
_property.argtypes, _text.argtypes = (ctypes.c_void_p, ctypes.c_int), (ctypes.c_void_p, ctypes.c_char_p)
_text.restype = ctypes.c_char_p
_errno = _libzmq.zmq_errno
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


class Inbox:
    """Receives a socket's frames, one at a time; for one thread at a time.

    Args:
        socket: one that others send to, which must not be closed before the last call.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = ctypes.c_void_p(socket.underlying)
        self._memory = ctypes.create_string_buffer(2 * _MESSAGE_BYTES)
        address = ctypes.addressof(self._memory)
        self._frame, self._released = map(ctypes.c_void_p, (address, address + _MESSAGE_BYTES))
        _init(self._frame)
        _init(self._released)

    def receive(self) -> bool:
        """Return whether there is a frame: the last one, if that was not released, or else the next.

        An empty frame counts as one, though it need not be released.

        Raises:
            zmq.ZMQError: the socket no longer exists.
        """
        if _size(self._frame):
            return True
        if _receive(self._frame, self._socket, zmq.NOBLOCK) >= 0:
            return True
        error = _errno()
        if error != zmq.EAGAIN:
            raise zmq.ZMQError(error)
        return False

    @property
    def is_full(self) -> bool:
        """Return whether there is a frame that has not been released."""
        return bool(_size(self._frame))

    @property
    def frame(self) -> memoryview:
        """Return the frame's bytes, which are valid until the next call."""
        view: memoryview = _view(_data(self._frame), _size(self._frame), _READ_ONLY)
        return view

    @property
    def sender(self) -> str:
        """Return the name that the authenticator gave to the connection that the frame came over."""
        return str(_text(self._frame, b"User-Id"), "ascii")

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the connection that the frame came over."""
        return int(_property(self._frame, _SOURCE_DESCRIPTOR))

    def release(self) -> None:
        """Forget the frame, which has been handled."""
        _move(self._released, self._frame)
