"""Memory that a rank exposes to those on other hosts, which write into it whatever its program does.

The transport's thread copies what comes (a ``put``, packets.py) to where it belongs, and acknowledges it. It
handles the packets of a sender in the order in which they were sent, so what is sent after a put is received
after it. A put is reliable: if the connection breaks, it comes again, before what was sent after it.
"""

from __future__ import annotations

import ctypes
from weakref import WeakValueDictionary

import torch

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.multihost.packets import Packet, PacketType, warnings
from torchestra.transport.message import Message


class ExposedMemory:
    """The tensors of one rank that others may write into, by the number of their window, which keeps them."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def expose(self, window: int, tensor: torch.Tensor | None) -> None:
        """Let others write into a contiguous tensor from now on; None: into none any more."""
        if tensor is None:
            self._tensors.pop(window, None)
        else:
            self._tensors[window] = tensor

    def write(self, message: Message, packet: Packet) -> PacketType:
        """Write what has come where it belongs; return the answer. Its sender has checked the bounds."""
        tensor, start = self._tensors.get(message.tag), packet.length
        length = sum(each.nbytes() for each in message.storages)
        if (
            tensor is None
            or message.lost is not None
            or len(message.storages) != 1
            or packet.dtype != DTYPE_CODE[tensor.dtype]
            or start + length > tensor.nbytes
        ):
            warnings.warn(
                "ignored a put of rank %d into window %d: %s",
                message.source,
                message.tag,
                message.lost or f"byte {start} and the following {length} are not in what is registered",
            )
            return PacketType.lost
        ctypes.memmove(tensor.data_ptr() + start, message.storages[0].data_ptr(), length)
        return PacketType.ack
