"""Messages in compiled functions: what ``TORCHDYNAMO_ENABLE_P2P_COMPILATION=1`` has torch.compile trace.

A message is two operators: one begins it and returns a handle, the other takes the handle, waits for the
message's end, and returns what was received. All of them have torch's *ordered effect*: a graph keeps them,
and keeps their order, by which a receiver matches messages.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchestra.communicator import work_registry
from torchestra.communicator.work import Work
from torchestra.errors import DistError
from torchestra.functional.groups import constant_while_traced
from torchestra.functional.inductor import MESSAGES
from torchestra.functional.operators import define, ops
from torchestra.process_group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.tensors import checks
from torchestra.types import Timeout
from torchestra.world.registry import current_world


@constant_while_traced
def are_traced() -> bool:
    """Return whether messages are traced; if so, see to it that they keep their order."""
    if not getattr(sys.modules.get("torch._dynamo.config"), "enable_p2p_compilation", False):
        return False
    from torch._higher_order_ops import effects

    for name in MESSAGES:
        operator = getattr(ops, name).default
        if effects._get_effect(operator) is None:
            effects._register_effectful_op(operator, effects._EffectType.ORDERED)
    return True


class Message:
    """The Work of a message that a compiled function has begun."""

    def __init__(self, handle: torch.Tensor, tensor: torch.Tensor, is_received: bool, source: int) -> None:
        self._handle = handle
        self._tensor = tensor
        self._is_received = is_received
        self._source = source
        self._ended = False

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the message is done, as Work.wait() does."""
        if timeout is not None:
            _await_handle(self._handle, timeout)
        if not self._ended:
            plain = self._tensor.detach()
            if self._is_received:
                plain.copy_(ops.end_receive(self._handle, plain))
            else:
                ops.end_send(self._handle, plain)
            self._ended = True
        return True

    def synchronize(self) -> None:
        """Do :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the message has ended, well or not; this breaks the graph."""
        return self._ended or _has_ended(self._handle)

    def source_rank(self) -> int:
        """Return the sender's rank in the group, if this is a receive that has ended; else -1."""
        return self._source if self._ended else -1

    def _source_rank(self) -> int:
        return self.source_rank()


@untraced
def _await_handle(handle: torch.Tensor, timeout: Timeout) -> None:
    if (work := work_registry.find(handle)) is not None:
        work.wait(timeout)


@untraced
def _has_ended(handle: torch.Tensor) -> bool:
    work = work_registry.find(handle)
    return work is None or work.is_completed()


def begin_send(tensor: torch.Tensor, rank: int, tag: int, name: str) -> Message:
    """Begin to send, to a rank of the group of this name."""
    return Message(ops.begin_send(tensor.detach(), rank, tag, name), tensor, False, -1)


def begin_receive(tensor: torch.Tensor, rank: int, tag: int, name: str) -> Message:
    """Begin to receive, from a rank of the group of this name; the tensor is changed by ``wait()``."""
    return Message(ops.begin_receive(tensor.detach(), rank, tag, name), tensor, True, rank)


def _handle_of(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.new_empty(1, dtype=torch.uint8)


def _like(_: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _expected(tensor: torch.Tensor, work: Work, group: ProcessGroup, name: str) -> torch.Tensor:
    handle = _handle_of(tensor)
    description = f"{name} on {tuple(tensor.shape)} of group {group.group_name!r}"
    work_registry.expect(handle, work, group, description, keeps_result=True)
    return handle


def _group(name: str, rank: int, tag: int, parameter: str, function: str) -> ProcessGroup:
    group = current_world().group(name)
    checks.check_rank(rank, group.size(), parameter, function)
    checks.check_tag(tag, function)
    return group


def _begin_send(tensor: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    group = _group(group_name, dst, tag, "dst", "isend")
    return _expected(tensor, group.communicator.isend(tensor, dst, tag), group, "isend")


def _begin_receive(like: torch.Tensor, src: int, tag: int, group_name: str) -> torch.Tensor:
    group = _group(group_name, src, tag, "src", "irecv")
    buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _expected(like, group.communicator.irecv(buffer, src, tag), group, "irecv")


def _end_send(handle: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Wait. The tensor is an argument so that its memory is not used for anything else before."""
    work_registry.wait_for(handle)
    return _handle_of(tensor)


def _end_receive(handle: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    work = work_registry.find(handle)
    if work is None:
        raise DistError("irecv: the group of this message was destroyed before it was waited for")
    work_registry.wait_for(handle)
    received: torch.Tensor = work.result()[0]
    return received


define("begin_send(Tensor input, int dst, int tag, str group_name) -> Tensor", _begin_send, _handle_of)
define("begin_receive(Tensor like, int src, int tag, str group_name) -> Tensor", _begin_receive, _handle_of)
define("end_send(Tensor handle, Tensor input) -> Tensor", _end_send, _handle_of)
define("end_receive(Tensor handle, Tensor like) -> Tensor", _end_receive, _like)
