"""Averages the gradients of some parameters together, when that of one parameter, the trigger, is ready.

Before each backward their gradients are made views of one tensor, which one operation reduces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.autograd_hooks import GradientHooks, weak_method
from torchestra.nn.parallel.buckets import shared_flat
from torchestra.nn.parallel.coalesced import broadcast_coalesced
from torchestra.nn.parallel.statistics import Counters
from torchestra.process_group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.types import ReduceOp


class DelayedReduction:
    """Averages the gradients of some parameters at a chosen moment. Must be constructed by all ranks.

    Args:
        parameters: the parameters, of one dtype. All ranks take rank 0's values.
        trigger: the gradients of ``parameters`` are reduced, and must be ready, when its own is computed.
        counters: count the work.

    Raises:
        InvalidArgumentError: the parameters have several dtypes, or there is none.

    Attributes:
        parameters: as given.
        divisor: divides sums; None: the number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        trigger: torch.Tensor,
        group: ProcessGroup,
        counters: Counters,
    ) -> None:
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) != 1:
            raise InvalidArgumentError(
                "delay_all_reduce_named_params must be some parameters of one dtype, got"
                f" {sorted(map(str, dtypes))}"
            )
        self.parameters = list(parameters)
        self.divisor: int | None = None
        self._counters = counters
        self._use(group)
        broadcast_coalesced([parameter.detach() for parameter in parameters], group)
        # Not before its own gradient is ready: it may be one of the parameters.
        self._hooks = GradientHooks(group, [trigger], [weak_method(self._reduce)])

    def remove_autograd_hook(self) -> None:
        """Take no part in backward any more."""
        self._hooks.remove()

    def update_process_group(self, group: ProcessGroup) -> None:
        """Average over these ranks from now on; a backward that has begun is not averaged."""
        self._use(group)
        self._hooks.update_process_group(group)

    def _use(self, group: ProcessGroup) -> None:
        self._group = group
        self._flat, self._views = shared_flat(self.parameters, group)
        self._armed = False

    @untraced
    def arm(self, *, averages: bool) -> None:
        """Accumulate the gradients of the forward that has ended in the one tensor; average them or not."""
        self._armed = averages
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def _reduce(self, _: torch.Tensor) -> None:
        if not self._armed:
            return
        self._armed = False
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not view:
                # Autograd, or the program, has replaced it by another tensor.
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view
        self._average(self._flat)

    def shadow(self, *, write_back: bool) -> None:
        """Take part in a reduction of the other ranks, contributing zeros.

        Args:
            write_back: make the averages this rank's gradients too; if not, its gradients do not change.
        """
        zeros = torch.zeros_like(self._flat)
        self._average(zeros)
        if write_back:
            self._flat.copy_(zeros)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view

    def _average(self, flat: torch.Tensor) -> None:
        began = time.perf_counter_ns()
        self._group.communicator.all_reduce(flat, ReduceOp.AVG if self.divisor is None else ReduceOp.SUM)
        if self.divisor is not None:
            flat.div_(self.divisor)
        took = time.perf_counter_ns() - began
        self._counters.communication_ns += took
        self._counters.wait_ns += took
        self._counters.bytes_reduced += flat.nbytes
