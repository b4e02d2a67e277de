"""Where an operation on tensors of a GPU goes: to NCCL if the group delegates, or else through the host.

A communicator has a ``delegation`` if its group delegates (engine/device/agreement.py): that has the
communicator that serves the device. Which way an operation goes follows from what all ranks have in common,
its kind, dtype and reduce operation. Tensors of the CPU are none of this file's business, and where torch was
built without CUDA there is nothing of it on their way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch

from torchestra.communicator.host_staging import POSSIBLE, is_on_gpu, staged, tensors_in
from torchestra.engine.operations import Collective
from torchestra.errors import InvalidArgumentError
from torchestra.types import ReduceOp

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Delegation(Protocol):
    """Hold the engine and the queue for devices of a communicator whose group delegates."""

    def serve(self, tensors: Sequence[torch.Tensor], op: ReduceOp | None = None) -> Any:
        """Return the communicator for an operation on these tensors, some of which are of a device.

        None if the host is to do it.

        Raises:
            InvalidArgumentError: they are not all on the group's device.
        """

    def communicator(self) -> Any:
        """Return the communicator for the device."""

    @property
    def agreement(self) -> Any:
        """Return what the ranks have agreed on for their devices."""

    def finish(self) -> None:
        """Wait until what is under way on the device has ended; raises what it has failed with."""

    def drain(self, timeout_s: float) -> None:
        """Wait until what is under way on the device has ended, at most so long."""

    def close(self) -> None:
        """Leave the group, as far as the device goes."""


def any_device(method: _Method) -> _Method:
    """A collective of a communicator, or a function of one, that takes tensors of GPUs as well."""
    return delegated(staged(method), method)


def delegated(method: _Method, own: _Method | None = None) -> _Method:
    """A collective that a delegation does where there is one; else it is done as always.

    Args:
        own: what the delegation's communicator calls, if that is another.
    """
    if not POSSIBLE:
        return method
    return cast(_Method, functools.wraps(method)(routed(method, own or method, is_on_gpu)))


def routed(
    method: Callable[..., Any], own: Callable[..., Any], is_on_device: Callable[[torch.Tensor], bool]
) -> Callable[..., Any]:
    """``method``, or ``own`` with the delegation's communicator if it serves the tensors of a device."""

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
    """Return what sends and receives a message of a tensor of a device without the host; None for the host.

    Backends of devices know neither tags nor receives from any rank: only messages of tag 0 are theirs.

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
