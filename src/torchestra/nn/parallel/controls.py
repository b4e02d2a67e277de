"""The part of a DistributedDataParallel that does not train: averaging, buffers, rebuilding, statistics."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchestra.algorithms.join import Joinable
from torchestra.errors import DistError, InvalidArgumentError, InvalidArgumentTypeError
from torchestra.nn.parallel.arguments import choose_group
from torchestra.nn.parallel.buffer_hooks import BufferCommHook, BufferCommHookLocation
from torchestra.nn.parallel.coalesced import BufferBroadcast, broadcast_coalesced
from torchestra.nn.parallel.comm_hooks.default_hooks import allreduce_hook
from torchestra.nn.parallel.comm_hooks.interface import BuiltinCommHookType, CommHook, check_comm_hook
from torchestra.nn.parallel.comm_hooks.optimizer_overlap_hooks import (
    OptimizerHookState,
    apply_optim_in_backward_hook,
    hook_then_optimizer,
)
from torchestra.nn.parallel.delayed import DelayedReduction
from torchestra.nn.parallel.logging_data import Logger, LoggingValue
from torchestra.nn.parallel.mixed_precision import LowPrecision
from torchestra.nn.parallel.rebuilding import follow, follow_in_modules
from torchestra.nn.parallel.reducer import Reducer
from torchestra.nn.parallel.statistics import Counters, DDPStatistics
from torchestra.optim.in_backward import in_backward_optimizers, remove_hook
from torchestra.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, default_group


class Controls(torch.nn.Module, Joinable):
    """A DistributedDataParallel without its construction, its forward and its copies."""

    module: torch.nn.Module
    process_group: ProcessGroup
    reducer: Reducer
    logger: Logger
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_backward_grad_sync: bool
    static_graph: bool
    find_unused_parameters: bool
    device_mesh: Any
    buffer_hook: BufferCommHook | None
    _counters: Counters
    _delayed: DelayedReduction | None
    _is_set_up: bool
    _divide_by_initial_world_size: bool
    _buffers_may_differ: bool
    _buffer_broadcast: BufferBroadcast
    _precision: LowPrecision | None
    _overlapped: list[ZeroRedundancyOptimizer]

    # -- how gradients are averaged

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average gradients in a way of your own. All ranks must do so, once, before the first backward.

        Args:
            state: handed to the hook. Groups in it are replaced by :meth:`rebuild`, and by nothing else.
            hook: ``hook(state, bucket)`` is called when all gradients of a bucket are there, with a
                :class:`torchestra.GradBucket`. It returns a ``torch.futures.Future`` of a tensor with the
                averages, laid out as ``bucket.buffer()``, or of the buffer itself. The hook must divide by
                the number of ranks. ``work.get_future()`` holds a list: chain
                ``.then(lambda future: future.value()[0])``.

        Raises:
            InvalidArgumentError: the hook cannot be called, or is annotated as something else; or all
                parameters are in ``delay_all_reduce_named_params``.
            GradientReductionError: there is a hook already, or gradients are being reduced.
        """
        with self._errors_logged():
            self._check_not_all_delayed()
            check_comm_hook(hook)
            self.reducer.register_comm_hook(state, hook)
        self.logger.set("comm_hook", getattr(hook, "__qualname__", repr(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Average gradients by a built-in hook; see :meth:`register_comm_hook`."""
        with self._errors_logged():
            self._check_not_all_delayed()
            self.reducer.register_builtin_comm_hook(comm_hook_type)
        self.logger.set("comm_hook", str(comm_hook_type))

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Let an optimizer update parameters as soon as their gradients are averaged, in backward.

        It must not be stepped otherwise; excludes communication hooks and :meth:`no_sync`.

        Args:
            optim: its class, called with the parameters, ``args`` and ``kwargs``.
            optim_params: which parameters to update; default: all.

        Raises:
            InvalidArgumentError: the optimizer's steps need a closure.
            GradientReductionError: there is a hook already.
        """
        with self._errors_logged():
            self._check_not_all_delayed()
        parameters = list(self.reducer.parameters if optim_params is None else optim_params)
        try:
            state = OptimizerHookState(optim(parameters, *args, **kwargs), parameters)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{optim} does not support overlapped DDP: {error}") from error
        self.register_comm_hook(self.process_group, hook_then_optimizer(allreduce_hook, state))

    def _set_up(self) -> None:
        """Take over, before the first forward, the optimizers that step in backward."""
        if self._delayed is not None and any(map(in_backward_optimizers, self._delayed.parameters)):
            with self._errors_logged():
                raise InvalidArgumentError(
                    "DistributedDataParallel: a parameter in delay_all_reduce_named_params has an optimizer"
                    " that steps in backward, before its gradient is averaged; step it after backward instead"
                )
        self._is_set_up = True
        stepped = [each for each in self.reducer.parameters if in_backward_optimizers(each)]
        if stepped:
            for parameter in stepped:
                remove_hook(parameter)
            self.register_comm_hook(self.process_group, apply_optim_in_backward_hook())
            self.reducer.discard_gradients(stepped)

    def _check_not_all_delayed(self) -> None:
        if not self.reducer.parameters:
            raise InvalidArgumentError(
                "DistributedDataParallel: all parameters are in delay_all_reduce_named_params, whose"
                " gradients no communication hook averages; leave that argument out to register one"
            )

    def _set_static_graph(self) -> None:
        """Do what the argument ``static_graph`` does, before training begins."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        with self._errors_logged():
            self.reducer.set_static_graph()
        self.static_graph = True
        self.logger.set("static_graph", 1)

    @contextlib.contextmanager
    def _errors_logged(self) -> Iterator[None]:
        """Log the errors that the block raises."""
        try:
            yield
        except DistError as error:
            self.logger.set_error(f"{type(error).__name__}: {error}")
            raise

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Have wrappers of ``module`` ignore these parameters and buffers.

        They are neither compared nor synchronised, and their gradients are not averaged.
        """
        ignored = set(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    # -- how buffers are synchronised

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, Mapping[str, torch.Tensor]], Any],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Synchronise buffers in a way of your own, instead of rank 0's broadcast. All ranks must do so.

        Args:
            state: handed to the hook.
            hook: ``hook(state, named_buffers)``; may return a list of futures, which the next backward waits
                for at its end.
            comm_hook_location: whether it runs before or after the module's forward.
        """
        if not callable(hook):
            raise InvalidArgumentTypeError(f"a buffer communication hook must be callable, got {hook!r}")
        self.buffer_hook = BufferCommHook(hook, state, comm_hook_location)

    def _run_buffer_hook(self, location: BufferCommHookLocation, wanted: bool) -> None:
        hook = self.buffer_hook
        if hook is None or hook.buffer_comm_hook_location is not location:
            return
        named = {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }
        if wanted and self.forward_sync_buffers and named:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, named)
            if futures is not None:
                self.reducer.install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast these buffers, or all, from a rank; for buffer hooks. Must be called by all ranks."""
        buffers = list(self.module.buffers()) if bufs is None else bufs
        if bucket_size is None:
            broadcast_coalesced(buffers, self.process_group, authoritative_rank)
        else:
            broadcast_coalesced(buffers, self.process_group, authoritative_rank, bucket_size)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward takes rank 0's buffers. Programs that run forwards themselves set it."""
        return self.require_backward_grad_sync or self._buffers_may_differ

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, required: bool) -> None:
        self._buffers_may_differ = required

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward takes rank 0's buffers: it is to, and there are some."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and any(name not in self.parameters_to_ignore for name, _ in self.module.named_buffers())
        )

    def _sync_buffers(self, reducing: bool, root: int) -> None:
        """Take the buffers of a rank before a forward pass, where they may differ."""
        if self.buffer_hook is not None:
            self._run_buffer_hook(BufferCommHookLocation.PRE_FORWARD, reducing or self._buffers_may_differ)
        elif self.forward_sync_buffers and (reducing or self._buffers_may_differ) and self._buffer_broadcast:
            began = time.perf_counter_ns()
            self._buffer_broadcast.run(root)
            took = time.perf_counter_ns() - began
            self._counters.communication_ns += took
            self._counters.wait_ns += took
        if self._buffers_may_differ is not reducing:  # setting a module's attribute is slow
            self._buffers_may_differ = reducing

    def _state(self, *, with_buffers: bool) -> list[torch.Tensor]:
        """Return the parameters, and the buffers if wanted, that are not ignored."""
        named: list[tuple[str, torch.Tensor]] = [*self.module.named_parameters()]
        if with_buffers:
            named += self.module.named_buffers()
        return [tensor for name, tensor in named if name not in self.parameters_to_ignore]

    def _take_state_of(self, rank: int) -> None:
        """Replace parameters and buffers by those of a rank. Must be called by all ranks."""
        state = self._state(with_buffers=self.forward_sync_buffers)
        if self._delayed is not None:
            state += self._delayed.parameters
        broadcast_coalesced(state, self.process_group, rank)

    # -- the group

    def rebuild(self, process_group: AnyGroup | None = None) -> None:
        """Average over another group from now on, such as after a failure. All of its ranks must call it.

        A step that failed is forgotten. Nothing is sent: since some ranks may have ended the step and others
        not, broadcast the state of one of them (parameters, buffers, optimizer) before you go on.

        The group replaces the old one in everything that belongs to the wrapper: in SyncBatchNorms inside,
        and in the state of a communication hook or buffer hook, if the state is the old group, or has it as
        an attribute or item. (Other groups there that were shrunk are replaced by their successors.) A state
        with a method ``on_rebuild()`` is reset by it: PowerSGD's and post-local SGD's count their first steps
        again. A ZeroRedundancyOptimizer that updates in backward is rebuilt too. You must replace the group
        yourself where a hook holds it otherwise, such as in its closure, and in other optimizers
        (:meth:`torchestra.optim.ZeroRedundancyOptimizer.rebuild`) and averagers.

        Args:
            process_group: the group; default: the default group, for instance after
                :meth:`ProcessGroup.shrink`.

        Raises:
            InvalidArgumentError: the wrapper is in a join context of the old group. Leave it first.
        """
        self._update_process_group(default_group() if process_group is None else process_group)

    def _update_process_group(self, new_process_group: AnyGroup) -> None:
        """Average over another group from now on; also after a group has failed.

        Does nothing on ranks that are not in it.
        """
        if new_process_group.rank() < 0:
            return
        former, group = self.process_group, choose_group(new_process_group, None)
        if self._join_config.enable:
            raise InvalidArgumentError(
                f"DistributedDataParallel.rebuild: the wrapper is in a join context over {former!r}, which"
                " has to be left before the group is replaced"
            )
        self.process_group = group
        self.device_mesh = None  # the mesh of the former group
        # On some ranks the forward pass has failed, on others not.
        self._buffers_may_differ = True
        follow_in_modules(self.module, former, group)
        if self.buffer_hook is not None:
            state = follow(self.buffer_hook.buffer_comm_hook_state, former, group)
            self.buffer_hook = self.buffer_hook._replace(buffer_comm_hook_state=state)
        if self._precision is not None:
            self._precision.restore()
        if self._delayed is not None:
            self._delayed.update_process_group(group)
        self.reducer.update_process_group(group)
        self.logger.set_group(group)
        self._buffer_broadcast = BufferBroadcast(self.module, group, self.parameters_to_ignore)
        for optimizer in self._overlapped:
            optimizer.rebuild(group)

    def _rebuild_too(self, optimizer: ZeroRedundancyOptimizer) -> None:
        """Rebuild an optimizer that a hook steps (ddp_zero_hook.py), too, when this wrapper is rebuilt."""
        self._overlapped.append(optimizer)

    def _buckets_are_final(self) -> bool:
        """Return whether the buckets will be the same in all further steps."""
        # Where unused parameters are looked for, buckets stay as they were made.
        return (self.find_unused_parameters and not self.static_graph) or self.reducer.rebuilt is not None

    # -- statistics

    def statistics(self) -> DDPStatistics:
        """Return how much was reduced so far on this rank, and how long it took."""
        return self._counters.snapshot()

    def _get_ddp_logging_data(self) -> dict[str, LoggingValue]:
        """Return a description of this wrapper and its work, in torch's fields."""
        return self.logger.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Sample logging data in every ``sample_rate``-th step after the first ten; 100 unless set."""
        if sample_rate < 1:
            with self._errors_logged():
                raise InvalidArgumentError(
                    "DDP runtime logging sample rate should be equal or greater than 1"
                )
        self.logger.sample_rate = sample_rate

    def _check_reducer_finalized(self) -> None:
        """Raise a GradientReductionError if the last backward has left gradients out."""
        self.reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        """Take no part in backward any more, so that another wrapper can."""
        self.reducer.remove_autograd_hooks()
        if self._delayed is not None:
            self._delayed.remove_autograd_hook()

    # -- torch's methods for modules on several devices

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> tuple[Any, Any]:
        """Return the inputs of each of this rank's devices: there is one device, so all inputs."""
        return (inputs,), (kwargs,)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> tuple[Any, Any]:
        """Move inputs to a device (its index, or a torch.device)."""
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)

        def moved(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return (tree_map(moved, inputs),), (tree_map(moved, kwargs),)

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Return the outputs of this rank's only device."""
        return outputs[0]
