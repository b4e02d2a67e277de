"""The fast path of blocking messages: what they do before their kernel, in as few steps as possible.

A small message takes half a microsecond, so that the Python around it decides. Here a call with a plain
tensor is told by as few questions as possible and handed to the mailbox; everything else, errors included,
goes the general way of :class:`~torchestra.communicator.communicator.Communicator`, whose methods these
functions decorate, and which gives the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.autograd import profiler

from torchestra.engine.dtypes import DTYPE_CODE
from torchestra.engine.interface import Engine
from torchestra.tensors.contiguity import TENSORS, plain_address

if TYPE_CHECKING:
    from torchestra.communicator.communicator import Communicator

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Plans:
    """What the fast path serves: messages of these dtypes, with their codes and bytes of an element.

    A dtype is put here when a message of it has gone the general way once, and so been checked; no complex
    one. An engine without kernels never gets one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.messages: dict[torch.dtype, tuple[int, int]] = {}

    def remember_messages(self, dtype: torch.dtype) -> None:
        """Serve messages of a dtype from now on."""
        if self._engine.kernels and not dtype.is_complex:
            self.messages[dtype] = (DTYPE_CODE[dtype], dtype.itemsize)

    def clear(self) -> None:
        """Have every call go the general way, which refuses it."""
        self.messages.clear()


def send(general: _Method) -> _Method:
    """The fast path of send."""

    @wraps(general)
    def method(
        self: Communicator, tensor: torch.Tensor, rank: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        if (
            tensor.__class__ in TENSORS
            and (found := self.fast.messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and timeout_s is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            engine: Any = self.engine
            engine.mailbox.send(
                address, tensor.numel() * unit, kind, rank, tag, engine.waiter(self.timeout_s)
            )
            return
        general(self, tensor, rank, tag, timeout_s)
        self.fast.remember_messages(tensor.dtype)

    return cast(_Method, method)


def recv(general: _Method) -> _Method:
    """The fast path of recv."""

    @wraps(general)
    def method(
        self: Communicator,
        tensor: torch.Tensor,
        rank: int | None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        if (
            tensor.__class__ in TENSORS
            and (found := self.fast.messages.get(tensor.dtype)) is not None
            and tag.__class__ is int
            and timeout_s is None
            and (address := plain_address(tensor))
            and not profiler._is_profiler_enabled
        ):
            kind, unit = found
            engine: Any = self.engine
            waiter = engine.waiter(self.timeout_s)
            return cast(int, engine.mailbox.recv(address, tensor.numel() * unit, kind, rank, tag, waiter))
        source = general(self, tensor, rank, tag, timeout_s)
        self.fast.remember_messages(tensor.dtype)
        return cast(int, source)

    return cast(_Method, method)
