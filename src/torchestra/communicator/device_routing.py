"""Route an operation on tensors of a GPU: to NCCL if the group delegates, or else through the host.

A communicator has a ``delegation`` if its group delegates (engine/device/agreement.py); this holds the
communicator that serves the device. The route depends only on what all ranks have in common: the operation's
kind, dtype and reduce operation. Tensors of the CPU are not affected, and if torch was built without CUDA
this file adds no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from torchestra.communicator.fake_tensors import or_fake
from torchestra.communicator.host_staging import POSSIBLE, is_on_gpu, staged, tensors_in
from torchestra.engine.operations import Collective
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Delegation(Protocol):
    """Hold the engine and the queue for devices of a communicator whose group delegates."""

    def serve(self, tensors: Sequence[torch.Tensor], op: ReduceOp | None = None) -> Any:
        """Return the communicator for an operation on these tensors, some of which are of a device.

        None if the operation is to go through the host.

        Raises:
            InvalidArgumentError: they are not all on the group's device.
        """

    def communicator(self) -> Any:
        """Return the communicator for the device."""

    @property
    def agreement(self) -> Any:
        """Return the ranks' agreement on their devices."""

    def finish(self) -> None:
        """Wait until the operations on the device have ended; raise the error of a failed one."""

    def drain(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until the operations on the device have ended."""

    def close(self) -> None:
        """Leave the group on the device."""


def any_device(method: _Method) -> _Method:
    """Make a communicator's method, or a function that takes one, accept tensors of GPUs and fake ones."""
    method = or_fake(method)
    return delegated(staged(method), method)


def delegated(method: _Method, own: _Method | None = None) -> _Method:
    """Have the delegation's communicator run a collective on tensors that it serves.

    Args:
        own: the function that runs there, if it is not ``method``.
    """
    if not POSSIBLE:
        return method
    return cast(_Method, functools.wraps(method)(routed(method, own or method, is_on_gpu)))


def routed(
    method: Callable[..., Any], own: Callable[..., Any], is_on_device: Callable[[torch.Tensor], bool]
) -> Callable[..., Any]:
    """Return a function that calls ``method``, or ``own`` with a delegation's communicator if that serves."""

    def call(communicator: Any, *args: Any, **kwargs: Any) -> Any:
        if (delegation := communicator.delegation) is None:
            return method(communicator, *args, **kwargs)
        given = [*args, *kwargs.values()]
        tensors = list(tensors_in(given))
        row = next((value for value in given if isinstance(value, Collective)), None)
        if any(map(is_on_device, tensors)) and (row is None or row.on_devices):
            op = next((value for value in given if isinstance(value, ReduceOp)), None)
            if (serving := delegation.serve(tensors, op)) is not None:
                return own(serving, *args, **kwargs)
        return method(communicator, *args, **kwargs)

    return call


def messages_of(communicator: Any, name: str, tensor: object, rank: int | None, tag: int) -> Any:
    """Return the :class:`Messages` for a device's tensor, or None if the message goes through the host.

    Backends of devices know neither tags nor receives from any rank: they get only messages of tag 0.

    Raises:
        InvalidArgumentError: the message is a receive from any rank.
    """
    serving = serving_message(communicator, tensor, tag)
    if serving is None:
        return None
    if rank is None:
        assert isinstance(tensor, torch.Tensor)
        raise InvalidArgumentError(
            f"{name}: a tensor of {tensor.device} cannot be received from any rank; name the rank, or give"
            " sender and receiver a tag other than 0 (then it goes through the host)"
        )
    return serving.messages


def serving_message(communicator: Any, tensor: object, tag: int) -> Any:
    """Return the device's communicator if it is to send or receive this message, or None."""
    if communicator.messages is not None:
        return communicator
    delegation = communicator.delegation
    if delegation is None or tag or not isinstance(tensor, torch.Tensor):
        return None
    return delegation.serve([tensor]) if is_on_gpu(tensor) else None
