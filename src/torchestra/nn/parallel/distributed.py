"""DistributedDataParallel: trains a module on many ranks."""

from __future__ import annotations

import contextlib
import copy
import time
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchestra.algorithms.join import DISABLED, Join, Joinable, JoinHook
from torchestra.errors import DistError, InvalidArgumentError
from torchestra.nn.parallel.agreement import check_agreement, describe
from torchestra.nn.parallel.arguments import (
    bucket_limits,
    check_delayed,
    check_is_module,
    check_module,
    check_not_all_delayed,
    choose_devices,
    choose_group,
    ignored_names,
    warn_of_check_reduction,
)
from torchestra.nn.parallel.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    compute_bucket_assignment_by_size,
)
from torchestra.nn.parallel.buffer_hooks import BufferCommHookLocation
from torchestra.nn.parallel.coalesced import BufferBroadcast, broadcast_coalesced
from torchestra.nn.parallel.controls import Controls
from torchestra.nn.parallel.delayed import DelayedReduction
from torchestra.nn.parallel.joining import DDPJoinHook, begin_step, check_can_join, set_divisor
from torchestra.nn.parallel.logging_data import Logger
from torchestra.nn.parallel.mixed_precision import LowPrecision, MixedPrecision, reduce_in
from torchestra.nn.parallel.reducer import Reducer
from torchestra.nn.parallel.statistics import Counters

# torch has these names in the module of this name, from which programs import them.
from torchestra.nn.parallel.torch_names import (  # noqa: F401
    _DEFAULT_BUCKET_CAP_MB,
    _MB_TO_BYTES,
    _BucketCapacityConfig,
    _BufferCommHook,
    _BufferCommHookLocation,
    _DDPJoinHook,
    _dump_DDP_relevant_env_vars,
    _find_tensors,
    _MixedPrecision,
)
from torchestra.process_group import ProcessGroup
from torchestra.system.untraced import untraced
from torchestra.world.init import AnyGroup, default_group, is_initialized

_NOT_COPIED = (
    "process_group",
    "device_mesh",
    "reducer",
    "logger",
    "_counters",
    "_buffer_broadcast",
    "_precision",
    "_overlapped",
)


class DistributedDataParallel(Controls):
    """A module whose copies on all ranks train together, each on its own samples.

    Wrap the same module on every rank of a group; then train as on one rank::

        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for samples, targets in my_share_of_the_data:
            optimizer.zero_grad()
            loss_function(model(samples), targets).backward()
            optimizer.step()

    At construction every rank takes rank 0's parameters and buffers. During ``backward`` gradients are
    averaged over the ranks, in buckets that are reduced while backward goes on, so that afterwards ``.grad``
    is bit for bit the same on all ranks: the gradient of the mean of the ranks' losses. Only ``.grad`` is
    averaged; ``torch.autograd.grad`` returns this rank's gradients. All ranks must run forward and backward
    the same number of times. A forward pass under ``torch.no_grad()`` leads to no reduction, and neither does
    a backward through ``model.module`` called directly.

    ``state_dict()`` has the prefix ``module.`` before every name, as torch's has. Only wrappers over the
    default group can be copied or pickled; the copy wraps a copy of the module, and has no hooks registered.
    Copying, pickling and unpickling do not communicate.

    Args:
        module: the module to train. Its parameters are on the CPU or on GPUs (whose gradients are sent
            through the host's memory), and at least one requires a gradient. Parameters must not be added,
            removed or frozen afterwards. An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` gets
            sparse averages.
        device_ids: for a module on one GPU, a list with that GPU (its number, or a torch.device), to which
            inputs are moved. Else None.
        output_device: for such a module, the nominal device of outputs.
        dim: must be 0; it concerns several devices per rank, which are not supported.
        broadcast_buffers: replace buffers, such as BatchNorm's statistics, by rank 0's at construction,
            before every forward pass that is to be reduced, and before the first one after it that is not.
        init_sync: compare the module between the ranks, and take rank 0's state. If False, you must ensure
            that modules and states are the same.
        process_group: the group; default: the default group.
        bucket_cap_mb: how many MiB of gradients are reduced together, roughly; default 25. The first bucket
            has 1 MiB, or this if less, so that communication begins early.
        find_unused_parameters: in every forward pass, find the parameters that its output does not depend on,
            and do not wait for their gradients, nor at the end of a backward for those of outputs that the
            loss does not depend on. A parameter that was used on no rank keeps its ``.grad`` as it was; one
            that was used on some ranks gets the average, to which the other ranks contribute their ``.grad``,
            or zeros. Costs a walk through autograd's graph.
        check_reduction: without effect, as in torch; deprecated there.
        gradient_as_bucket_view: let each ``.grad`` be part of a bucket. Saves memory; but a ``.grad`` that
            you keep is overwritten by the next backward, and cannot be detached in place.
        static_graph: declare that every step uses the same parameters as the first, equally often. Then
            unused parameters are found once, and a parameter may get its gradient in several parts (reentrant
            checkpointing of shared weights). The first step reduces after backward.
        delay_all_reduce_named_params, param_to_hook_all_reduce: some parameters by name, of one dtype, whose
            gradients are averaged all at once, when that of ``param_to_hook_all_reduce`` has been computed;
            theirs must be ready by then. No other argument applies to them, nor does a communication hook.
            With some, but not all, of the parameters, :meth:`join` is not supported.
        mixed_precision: dtypes to compute and average in; parameters, gradients and ``state_dict`` have
            their own dtypes outside of forward and backward. Excludes communication hooks.
        skip_all_reduce_unused_params: do not reduce buckets of which no parameter was used. All ranks must
            leave the same parameters unused.
        device_mesh: a mesh of one dimension, whose group is used; instead of ``process_group``.
        bucket_cap_mb_list: the MiB of the first bucket, the second and so on; the last is for all further.
        batched_grad_copy: without effect: gradients are always copied into buckets together.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``; overrides it, except that buffers
            are replaced by rank 0's at construction in any case.

    Raises:
        InvalidArgumentError: an argument is wrong; or, on all ranks, with ``init_sync``, the module or the
            arguments are not the same on all ranks.
        NotInitializedError: there is no default group, and none was given.
        GradientReductionError: from a forward pass: the previous backward has left out parameters, or has
            raised. From a backward: it has computed a gradient twice. The message says which and what to do.
        RankFailedError, CollectiveTimeoutError, GroupAbortedError: from construction, forward and backward,
            as from an all_reduce. The group cannot be used any more.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: AnyGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        check_is_module(module)
        warn_of_check_reduction(check_reduction)
        self.module = module
        self.process_group = choose_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.dim = dim
        self.forward_sync_buffers = (
            broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = False
        self.mixed_precision = mixed_precision
        self.buffer_hook = None
        self.require_backward_grad_sync = True
        self._divide_by_initial_world_size = True
        self._buffers_may_differ = not init_sync
        delayed = self._check_parameters(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._choose_devices(device_ids, output_device, dim)
        limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, FIRST_BUCKET_BYTES, BUCKET_CAP_MB)
        self._bucket_limits, self.bucket_bytes_cap = limits, max(limits)
        if init_sync:
            self._sync_state(static_graph, self.forward_sync_buffers or forward_sync_buffers is not None)
        self._counters = Counters()
        self._delayed = None
        if delayed and param_to_hook_all_reduce is not None:
            self._delayed = DelayedReduction(
                delayed, param_to_hook_all_reduce, self.process_group, self._counters
            )
        self._make_reducer()
        if static_graph:
            self._set_static_graph()

    def _check_parameters(
        self, delayed: Sequence[tuple[str, torch.nn.Parameter]] | None, trigger: torch.nn.Parameter | None
    ) -> list[torch.Tensor]:
        """Check the parameters to train; return those whose gradients are averaged together later."""
        named = check_delayed(delayed, trigger)
        self.parameters_to_ignore = ignored_names(self.module) | named.keys()
        if self.mixed_precision is not None:
            check_not_all_delayed(self.module, self.parameters_to_ignore, named)
        check_module(self.module, self.parameters_to_ignore, self.process_group, may_be_empty=bool(named))
        return list(named.values())

    def _choose_devices(self, device_ids: Sequence[Any] | None, output_device: Any, dim: int) -> None:
        parameters = list(self.module.parameters())
        device, output = choose_devices(device_ids, output_device, dim, parameters)
        self.device = parameters[0].device
        self.device_ids = None if device is None else [device.index]
        self.output_device = None if output is None else output.index

    def _sync_state(self, static_graph: bool, with_buffers: bool) -> None:
        """Compare the module between the ranks, and take rank 0's state."""
        options = {
            "bucket_cap_mb": [limit / (1 << 20) for limit in self._bucket_limits],
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_buffers": self.forward_sync_buffers,
            "static_graph": static_graph,
        }
        check_agreement(describe(self.module, options, self.parameters_to_ignore), self.process_group)
        broadcast_coalesced(self._state(with_buffers=with_buffers), self.process_group)

    def _trained(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return the parameters whose gradients are averaged, by name, and whether these are sparse."""
        trained: dict[str, tuple[torch.Tensor, bool]] = {}
        known: set[torch.Tensor] = set()
        for path, owner in self.module.named_modules():
            sparse = isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and owner.sparse
            for name, parameter in owner.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                ignored = full in self.parameters_to_ignore or parameter in known
                if parameter.requires_grad and not ignored:
                    known.add(parameter)
                    trained[full] = parameter, sparse
        return trained

    def _make_reducer(self) -> None:
        """Make the parts that are not copied or pickled: the reducer, its logger, and so on."""
        self._precision, dtypes = None, self.mixed_precision
        if dtypes is not None:  # its hooks come before the reducer's
            self._precision = LowPrecision(dtypes, self.module, self.parameters_to_ignore)
        trained = self._trained()
        parameters = [parameter for parameter, _ in trained.values()]
        sparse = [is_sparse for _, is_sparse in trained.values()]
        plan: list[list[int]] = []
        plan_limits: list[int] = []
        if parameters:
            plan, plan_limits = compute_bucket_assignment_by_size(parameters, self._bucket_limits, sparse)
        # Gradients arrive last layer first.
        self.reducer = Reducer(
            parameters,
            plan[::-1],
            plan_limits[::-1],
            self.process_group,
            sparse,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            param_to_name_mapping=dict(enumerate(trained)),
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            bucket_size_limits_for_rebuilding=self._bucket_limits,
            counters=self._counters,
            may_be_empty=self._delayed is not None,
        )
        self._buffer_broadcast = BufferBroadcast(self.module, self.process_group, self.parameters_to_ignore)
        self._overlapped = []
        self._is_set_up = False
        self._make_logger(parameters)
        if dtypes is not None and (dtype := dtypes.reduce_dtype or dtypes.param_dtype) is not None:
            self.register_comm_hook(self.process_group, reduce_in(dtype))

    def _make_logger(self, parameters: Sequence[torch.Tensor]) -> None:
        self.logger = Logger(self.reducer, self.process_group)
        self.logger.set_construction_data(
            parameters,
            module_name=type(self.module).__name__,
            device_ids="" if self.device_ids is None else str(self.device.index),
            output_device=-1 if self.output_device is None else self.output_device,
            broadcast_buffers=self.forward_sync_buffers,
            bucket_cap_bytes=self.bucket_bytes_cap,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            has_sync_bn=any(type(each).__name__ == "SyncBatchNorm" for each in self.module.modules()),
        )

    # -- training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the gradients of its output will be averaged, unless in :meth:`no_sync`."""
        reducing = self.require_backward_grad_sync and torch.is_grad_enabled()
        inputs, kwargs = self._before(reducing, inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        self._after(reducing, output)
        if self._delayed is not None:
            self._delayed.arm(averages=reducing)
        return output

    @untraced
    def _before(self, reducing: bool, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare for the module's forward; return the inputs for it."""
        if not self._is_set_up:
            self._set_up()
        root = 0
        if self._join_config.enable:
            root = begin_step(self, reducing)
        else:
            set_divisor(self, None)
        if reducing:
            self.logger.before_forward()
            try:
                self.reducer.prepare_for_forward()
            except DistError as error:
                self.logger.set_error(str(error))
                raise
        self._sync_buffers(reducing, root)
        if self.device_ids is not None:
            (inputs,), (kwargs,) = self.to_kwargs(inputs, kwargs, self.device)
        if self._precision is not None:
            inputs, kwargs = self._precision.lower((inputs, kwargs))
        return inputs, kwargs

    @untraced
    def _after(self, reducing: bool, output: Any) -> None:
        """Expect gradients after the module's forward."""
        if self.buffer_hook is not None:
            self._run_buffer_hook(BufferCommHookLocation.POST_FORWARD, reducing)
        if self._precision is not None:
            self._precision.after(output)
        if reducing:
            counters = self._counters
            began, ended = counters.forward_started, time.perf_counter_ns()
            counters.forward_ns += ended - began
            self.reducer.record_spans([("forward", began, ended, -1, 0)])
            self.reducer.prepare_for_backward(output)
        elif torch.is_grad_enabled():
            self.reducer.watch(output)

    @property
    def broadcast_buffers(self) -> bool:
        """Return whether buffers are replaced by rank 0's."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: do not reduce those of forward passes in the block.

        The next backward of a forward pass outside the block averages everything accumulated. What counts is
        whether *forward* runs in the block. All ranks must do the same.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs. All ranks must enter it.

        A rank that has run out of them takes part in the others' steps with gradients of zero. At the end all
        ranks take the state of the last rank that had inputs. See :class:`torchestra.algorithms.join.Join`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of ranks, so that every input
                has the same weight; if False, by the number of ranks that still have inputs.
            enable: False makes the context do nothing, for inputs that are known to be even.
            throw_on_early_termination: raise an error on all ranks when one runs out of inputs.

        Raises:
            InvalidArgumentError: some parameters are in ``delay_all_reduce_named_params`` and others not.
        """
        if enable:
            check_can_join(self)
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """Return the hook that shadows the steps of this wrapper in a join context."""
        return DDPJoinHook(self, divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """Return the device of a join context, which is the module's."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Return the group of a join context."""
        return self.process_group

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        if self._delayed is not None:
            raise InvalidArgumentError("DDP with delay_all_reduce_named_params cannot be pickled or copied")
        state = copy.copy(self.__dict__)
        for name in _NOT_COPIED:
            del state[name]
        state["_join_config"] = DISABLED
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = choose_group(None, None)
        self.device_mesh = None
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._counters = Counters()
        self._make_reducer()
        if self.static_graph:
            self.static_graph = False
            self._set_static_graph()

    def _check_default_group(self) -> None:
        if not is_initialized() or self.process_group is not default_group():
            raise InvalidArgumentError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group."
                f" This one is over {self.process_group!r}; copy its `.module`, and wrap the copy"
            )


def _pass_as_torchs() -> None:
    """Make ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` true for ours.

    Checkpoints, trainers and pipelines check it before they use ``.module`` and ``no_sync()``.
    """
    theirs = torch.nn.parallel.DistributedDataParallel
    if isinstance(theirs, ABCMeta):
        theirs.register(DistributedDataParallel)


_pass_as_torchs()
