"""Hooks that synchronise a module's buffers in a program's own way."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union

import torch

_Futures = Union[Sequence["torch.futures.Future[Any]"], None]


class BufferCommHookLocation(enum.Enum):
    """The time of a buffer hook: before the module's forward, or after it."""

    PRE_FORWARD = 1
    POST_FORWARD = 2


class BufferCommHook(NamedTuple):
    """A buffer hook: ``hook(state, named_buffers)`` synchronises the buffers.

    It may return futures, for which the reducer waits at the end of backward.
    """

    buffer_comm_hook: Callable[[Any, Mapping[str, torch.Tensor]], _Futures]
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: BufferCommHookLocation
