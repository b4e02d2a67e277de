"""DistributedDataParallel: the module that users wrap theirs in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError
from torchestra.nn.parallel.agreement import check_agreement, describe
from torchestra.nn.parallel.buckets import BUCKET_CAP_MB, FIRST_BUCKET_BYTES, plan_buckets
from torchestra.nn.parallel.coalesced import BufferBroadcast, broadcast_coalesced
from torchestra.nn.parallel.reducer import Reducer
from torchestra.nn.parallel.statistics import Counters, DDPStatistics
from torchestra.process_group import ProcessGroup
from torchestra.types import ReduceOp
from torchestra.world import AnyGroup, default_group

__all__ = ["DistributedDataParallel"]

_NAME = "DistributedDataParallel"


class DistributedDataParallel(torch.nn.Module):
    """A module whose copies on all ranks train together, each on samples of its own.

    Wrap the same module on every rank of a group; then train as on one rank::

        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for samples, targets in my_share_of_the_data:
            optimizer.zero_grad()
            loss_function(model(samples), targets).backward()
            optimizer.step()

    At construction every rank takes rank 0's parameters and buffers. During ``backward`` gradients are
    averaged over the ranks, in buckets that are reduced while backward goes on, so that afterwards ``.grad``
    is, bit for bit, the same everywhere: the gradient of the mean of the ranks' losses. Only ``.grad`` is
    averaged; ``torch.autograd.grad`` returns this rank's gradients. All ranks must run forward and backward
    the same number of times. A forward pass under ``torch.no_grad()`` leads to no reduction, and neither does
    a backward through ``model.module`` called directly.

    ``state_dict()`` has the prefix ``module.`` before every name, as torch's has. The wrapper cannot be
    pickled or copied yet; ``model.module`` can.

    Args:
        module: what to train. Its parameters are on the CPU, and one at least requires a gradient. Parameters
            must not be added, removed or frozen afterwards.
        device_ids, output_device: must be None; modules on other devices are not served yet.
        dim: must be 0; it concerns several devices per rank, which are not served.
        broadcast_buffers: replace buffers, such as BatchNorm's statistics, by rank 0's before every forward
            pass that is to be reduced, and before the first one after it that is not.
        init_sync: compare the module between the ranks, and take rank 0's state. If False, you answer for
            both.
        process_group: the group; default: the default group.
        bucket_cap_mb: how many MiB of gradients are reduced together, roughly; default 25. The first bucket
            has 1 MiB, or this if it is less, so that communication begins early.
        find_unused_parameters: in every forward pass, find the parameters that its output does not depend on,
            and do not wait for their gradients. Needed when the loss does not depend on all parameters. A
            parameter that was used on no rank keeps its ``.grad`` as it was; one that was used on some gets
            the average, to which the others contribute what they have in ``.grad``, or zeros. Costs a walk
            through autograd's graph.
        check_reduction: must be False; torch has it for old programs, without effect.
        gradient_as_bucket_view: let each ``.grad`` be part of a bucket. Saves one copy of all gradients in
            time and in memory; but a ``.grad`` that you keep is overwritten by the next backward, and cannot
            be detached in place.
        static_graph: must be False; not served yet.

    Raises:
        InvalidArgumentError: an argument is not served, the module cannot be trained so, or (on every rank)
            the modules or arguments of the ranks differ.
        NotInitializedError: there is no default group, and none was given.
        GradientReductionError: from a forward pass: the backward before has left out parameters, or has
            raised. From a backward: it has computed a gradient twice. The message says which and what to do.
        RankFailedError, CollectiveTimeoutError and what else an all_reduce raises: from construction, forward
            and backward. The group cannot be used any more.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: None = None,
        output_device: None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: AnyGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        _refuse("device_ids", device_ids, (None, []), "only modules on the CPU are served")
        _refuse("output_device", output_device, (None,), "only modules on the CPU are served")
        _refuse("dim", dim, (0,), "a rank has one device, so nothing is scattered")
        _refuse("check_reduction", check_reduction, (False,), "it has no effect in torch either")
        _refuse("static_graph", static_graph, (False,), "use find_unused_parameters if not all are used")
        group = default_group() if process_group is None else process_group
        if not isinstance(group, ProcessGroup):
            raise InvalidArgumentError(f"{_NAME}: `process_group`: this rank is {group!r}")
        cap_mb = BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        if isinstance(cap_mb, bool) or not isinstance(cap_mb, (int, float)) or not cap_mb > 0:
            raise InvalidArgumentError(f"{_NAME}: `bucket_cap_mb` must be a positive number, got {cap_mb!r}")
        _check_module(module, group)
        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self.bucket_bytes_cap = int(cap_mb * (1 << 20))
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        if init_sync:
            options = {
                "bucket_cap_mb": cap_mb,
                "find_unused_parameters": find_unused_parameters,
                "broadcast_buffers": broadcast_buffers,
            }
            check_agreement(describe(module, options), group)
            broadcast_coalesced([*module.parameters(), *module.buffers()], group)
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        parameters = [parameter for _, parameter in named]
        self._counters = Counters()
        self._reducer = Reducer(
            parameters,
            [name for name, _ in named],
            plan_buckets(parameters, min(FIRST_BUCKET_BYTES, self.bucket_bytes_cap), self.bucket_bytes_cap),
            group,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            counters=self._counters,
        )
        self._buffers_to_broadcast = BufferBroadcast(module, group)
        self._buffers_may_differ = not init_sync

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and have the gradients of what it returns averaged, unless in :meth:`no_sync`."""
        reducing = self.require_backward_grad_sync and torch.is_grad_enabled()
        if reducing:
            self._reducer.prepare_for_forward()
        began = time.perf_counter()
        if self.broadcast_buffers and (reducing or self._buffers_may_differ) and self._buffers_to_broadcast:
            self._broadcast_buffers_now()
        self._buffers_may_differ = reducing
        output = self.module(*inputs, **kwargs)
        if reducing:
            self._counters.forward_seconds += time.perf_counter() - began
            self._reducer.prepare_for_backward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank: those of forward passes in the block are not reduced.

        The next backward of a forward pass outside the block averages all that has been added up. What counts
        is where *forward* runs. All ranks must do the same.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def statistics(self) -> DDPStatistics:
        """How much was reduced so far and where the time went, on this rank."""
        return self._counters.snapshot()

    def _broadcast_buffers_now(self) -> None:
        began = time.perf_counter()
        self._buffers_to_broadcast.run()
        seconds = time.perf_counter() - began
        self._counters.communication_seconds += seconds
        self._counters.wait_seconds += seconds

    def __getstate__(self) -> NoReturn:
        raise InvalidArgumentTypeError(
            f"{_NAME} cannot be pickled or copied; do so with its `.module`, and wrap the copy on every rank"
        )


def _refuse(argument: str, value: object, served: tuple[object, ...], why: str) -> None:
    if value not in served:
        raise InvalidArgumentError(f"{_NAME}: `{argument}` must be {served[0]!r} ({why}), got {value!r}")


def _check_module(module: object, group: ProcessGroup) -> None:
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentTypeError(
            f"{_NAME}: `module` must be a torch.nn.Module, got {type(module).__name__}"
        )
    for name, each in module.named_modules():
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse:
            raise InvalidArgumentError(
                f"{_NAME}: `{name}` makes sparse gradients, and only dense ones are reduced; use sparse=False"
            )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"{_NAME}: `{name}` is not initialized yet; run a forward pass through the module first"
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{_NAME}: `{name}` is on device {tensor.device} with layout {tensor.layout}, and only dense"
                " tensors on the CPU are served"
            )
        if not group.communicator.engine.moves(tensor.dtype):
            raise InvalidArgumentError(f"{_NAME}: `{name}` has dtype {tensor.dtype}, which cannot be sent")
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgumentError(
            f"{_NAME} is not needed when a module doesn't have any parameters that require a gradient"
        )
    for name, parameter in trained:
        if not group.communicator.engine.reduces(parameter.dtype, ReduceOp.AVG):
            raise InvalidArgumentError(
                f"{_NAME}: `{name}` has dtype {parameter.dtype}, whose gradients cannot be averaged"
            )
