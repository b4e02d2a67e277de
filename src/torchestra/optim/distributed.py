"""Updates parameters on the workers that own them, by a context's gradients."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from torchestra.autograd import get_gradients
from torchestra.errors import InvalidArgumentError
from torchestra.optim.functional import FunctionalOptimizer
from torchestra.rpc import RRef, WorkerInfo, rpc_async


class DistributedOptimizer:
    """An optimizer of parameters on many workers.

    Each worker makes an optimizer of its own parameters. A step runs all of these concurrently, by the
    gradients that a distributed autograd context has on each worker; ``.grad`` is not used. Several trainers
    may step at once, each with its own optimizer or all with one: each worker makes one step at a time, in
    any order, possibly between another trainer's forward pass and its backward pass.

    Args:
        optimizer_class: a class of torch.optim, or one like those, whose steps need no closure.
        params_rref: references to parameters, on any workers.
        args, kwargs: arguments of the optimizer on each worker.

    Raises:
        InvalidArgumentError: there are no parameters.
        Exception: the optimizer's error on a worker, which the message names. If several workers had errors,
            the first one; the others are its notes.
        RpcError: a worker could not be called.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Sequence[RRef],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        of_workers: dict[WorkerInfo, list[RRef]] = {}
        for param in params_rref:
            of_workers.setdefault(param.owner(), []).append(param)
        if not of_workers:
            raise InvalidArgumentError("optimizer got an empty parameter list")
        self.remote_optimizers: list[RRef] = _all(
            [
                rpc_async(worker, _make, (optimizer_class, params, args, kwargs))
                for worker, params in of_workers.items()
            ]
        )

    def step(self, context_id: int) -> None:
        """Have every worker update its parameters that have a gradient in a context.

        Must be called on a worker that takes part in the context.

        Raises:
            RpcError: there is no such context here, or a worker could not be called.
            Exception: as for the constructor.
        """
        get_gradients(context_id)
        _all([rpc_async(each.owner(), _step, (each, context_id)) for each in self.remote_optimizers])


def _all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all futures; return their values, or raise their errors."""
    results, errors = [], list[Exception]()
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        if hasattr(errors[0], "add_note"):  # from Python 3.11 on
            for other in errors[1:]:
                errors[0].add_note(f"and another worker: {other}")
        raise errors[0]
    return results


# Functions that workers call on each other.

_stepping = threading.Lock()
"""Held by the one optimizer of this process that steps: several trainers may have the same parameters."""


def _make(
    optimizer_class: type[torch.optim.Optimizer],
    params: list[RRef],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef:
    parameters = [each.local_value() for each in params]
    return RRef(FunctionalOptimizer(optimizer_class, parameters, *args, **kwargs))


def _step(optimizer_rref: RRef, context_id: int) -> None:
    optimizer: FunctionalOptimizer = optimizer_rref.local_value()
    gradients = get_gradients(context_id)
    with _stepping:
        optimizer.step([gradients.get(param) for param in optimizer.parameters])
