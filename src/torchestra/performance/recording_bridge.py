"""A bridge between hosts that writes down its messages, and moves only those that ranks need to go on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

from torchestra.engine.multihost.bridge import Bridge, PeerTensors
from torchestra.performance.rank_log import current_log
from torchestra.performance.schedule import Receive, Send
from torchestra.performance.turns import wait_for

_MOVED_BYTES = 128 << 10
"""Messages up to this arrive; of longer ones only their length, since they hold nothing but the tensors."""

_Key = tuple[int, int, int, int]


@dataclass
class Mailboxes:
    """The messages between the recorded hosts.

    Attributes:
        recorded: the hosts.
        sent: by sender, receiver, local rank and tag: the bytes, as an address and a length, of which the
            address is 0 where they are not moved; and the tensor that keeps them.
    """

    recorded: frozenset[int]
    sent: dict[_Key, tuple[int, int, torch.Tensor | None]] = field(default_factory=dict)


class RecordingBridge(Bridge):
    """See Bridge. Messages between recorded hosts arrive; the others mirror what this end sends them.

    Args:
        local_rank: the local rank of all ends.
    """

    kind = "recording"

    def __init__(self, host: int, size: int, local_rank: int, mailboxes: Mailboxes) -> None:
        super().__init__(host, size)
        self.local_rank = local_rank
        self.tags = 0
        self._mailboxes = mailboxes

    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> _Pending:
        with torch._C.DisableTorchFunction():  # nothing here is a copy of the product's
            return self._begin_recording(receives, sends)

    def _begin_recording(self, receives: PeerTensors, sends: PeerTensors) -> _Pending:
        log, boxes = current_log(), self._mailboxes
        log.overhead("bridge_begin")
        tag, self.tags = self.tags, self.tags + 1
        for nbytes, ends in _by_length([(end, tensor.numel()) for end, tensor in sends]):
            log.add(Send(ends, nbytes, tag))
        mirrored: dict[int, torch.Tensor] = {}
        for end, tensor in sends:
            if end in boxes.recorded:
                kept = tensor.clone() if tensor.numel() <= _MOVED_BYTES else None
                address = 0 if kept is None else kept.data_ptr()
                boxes.sent[self.host, end, self.local_rank, tag] = address, tensor.numel(), kept
            else:
                mirrored[end] = tensor
        return _Pending(self, boxes, tag, receives, mirrored)

    def close(self) -> None:
        pass


class _Pending:
    """See bridge.Pending."""

    def __init__(
        self,
        bridge: RecordingBridge,
        boxes: Mailboxes,
        tag: int,
        receives: PeerTensors,
        mirrored: dict[int, torch.Tensor],
    ) -> None:
        self._bridge, self._boxes, self._tag = bridge, boxes, tag
        self._receives, self._mirrored = receives, mirrored

    def wait(self, timeout_s: float) -> bool:
        log = current_log()
        with torch._C.DisableTorchFunction():
            lengths = [(end, self._take(end, buffer)) for end, buffer in self._receives]
        for nbytes, ends in _by_length(lengths):
            log.add(Receive(ends, nbytes, self._tag))
        return True

    def awaited(self) -> tuple[int, ...]:
        return ()

    def _take(self, end: int, buffer: torch.Tensor) -> int:
        """Fill the buffer of a message; return the message's length."""
        if end in self._boxes.recorded:
            key = end, self._bridge.host, self._bridge.local_rank, self._tag
            wait_for(lambda: key in self._boxes.sent)
            address, length, _ = self._boxes.sent.pop(key)
        else:
            tensor = self._mirrored.get(end)
            length = buffer.numel() if tensor is None else tensor.numel()
            address = 0 if tensor is None else tensor.data_ptr()
        if address and length <= min(_MOVED_BYTES, buffer.numel()):
            ctypes.memmove(buffer.data_ptr(), address, length)
        return length


def _by_length(lengths: Iterable[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield, for neighbours of one length, that and the ends."""
    for nbytes, group in groupby(lengths, key=lambda each: each[1]):
        yield nbytes, tuple(end for end, _ in group)
