"""DistributedDataParallel: the module that users wrap theirs in."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from torchestra.algorithms.join import DISABLED, Join, Joinable, JoinHook
from torchestra.errors import DistError, GradientReductionError, InvalidArgumentError
from torchestra.nn.parallel.agreement import check_agreement, describe
from torchestra.nn.parallel.arguments import (
    bucket_limits,
    check_devices,
    check_is_module,
    check_module,
    choose_group,
    ignored_names,
)
from torchestra.nn.parallel.buckets import (
    BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    compute_bucket_assignment_by_size,
)
from torchestra.nn.parallel.coalesced import BufferBroadcast, broadcast_coalesced
from torchestra.nn.parallel.comm_hooks import BuiltinCommHookType, CommHook, check_comm_hook
from torchestra.nn.parallel.joining import DDPJoinHook, begin_step
from torchestra.nn.parallel.logging_data import Logger, LoggingValue
from torchestra.nn.parallel.reducer import Reducer
from torchestra.nn.parallel.statistics import Counters, DDPStatistics
from torchestra.process_group import ProcessGroup
from torchestra.world import AnyGroup, default_group, is_initialized

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module, Joinable):
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

    ``state_dict()`` has the prefix ``module.`` before every name, as torch's has. A copy or a pickle, which
    only wrappers over the default group have, is a wrapper of a copy of the module, with no hooks registered;
    none of the ranks waits for another in making or loading it.

    Args:
        module: what to train. Its parameters are on the CPU, and one at least requires a gradient. Parameters
            must not be added, removed or frozen afterwards. An ``nn.Embedding`` or ``nn.EmbeddingBag`` with
            ``sparse=True`` gets sparse averages.
        device_ids, output_device: must be None; modules on other devices are not served.
        dim: must be 0; it concerns several devices per rank, which are not served.
        broadcast_buffers: replace buffers, such as BatchNorm's statistics, by rank 0's at construction,
            before every forward pass that is to be reduced, and before the first one after it that is not.
        init_sync: compare the module between the ranks, and take rank 0's state. If False, you answer for
            both.
        process_group: the group; default: the default group.
        bucket_cap_mb: how many MiB of gradients are reduced together, roughly; default 25. The first bucket
            has 1 MiB, or this if it is less, so that communication begins early.
        find_unused_parameters: in every forward pass, find the parameters that its output does not depend on,
            and do not wait for their gradients, nor at the end of a backward for those of outputs that the
            loss does not depend on. A parameter that was used on no rank keeps its ``.grad`` as it was; one
            that was used on some gets the average, to which the others contribute what they have in
            ``.grad``, or zeros. Costs a walk through autograd's graph.
        check_reduction: without effect, as in torch; deprecated there.
        gradient_as_bucket_view: let each ``.grad`` be part of a bucket. Saves memory; but a ``.grad`` that
            you keep is overwritten by the next backward, and cannot be detached in place.
        static_graph: every step is like the first: the same parameters are used, equally often. Then unused
            parameters are found once, and a parameter may get its gradient in several parts (reentrant
            checkpointing of shared weights). The first step reduces after backward.
        skip_all_reduce_unused_params: do not reduce buckets of which no parameter was used. All ranks must
            leave the same parameters unused.
        device_mesh: a mesh of one dimension, whose group is taken; instead of ``process_group``.
        bucket_cap_mb_list: the MiB of the first bucket, the second and so on; the last is for all further.
        batched_grad_copy: without effect: gradients are always copied into buckets together.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``; wins over it, but lets buffers be
            rank 0's at construction in any case.

    Raises:
        InvalidArgumentError: an argument is wrong. With ``init_sync`` also when the module or the arguments
            are not the same on all ranks; then on all of them.
        NotInitializedError: there is no default group, and none was given.
        GradientReductionError: from a forward pass: the backward before has left out parameters, or has
            raised. From a backward: it has computed a gradient twice. The message says which and what to do.
        RankFailedError, CollectiveTimeoutError and what else an all_reduce raises: from construction, forward
            and backward. The group cannot be used any more.
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
        *,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        check_is_module(module)
        group = choose_group(process_group, device_mesh)
        self.parameters_to_ignore = ignored_names(module)
        check_devices(device_ids, output_device, dim, list(module.parameters()))
        check_module(module, self.parameters_to_ignore, group)
        if check_reduction:
            warnings.warn(
                "`check_reduction` has no effect: reductions always end, whatever is unused",
                FutureWarning,
                stacklevel=2,
            )
        limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, FIRST_BUCKET_BYTES, BUCKET_CAP_MB)
        self.module = module
        self.process_group = group
        self.device_mesh = device_mesh
        self.device = torch.device("cpu")
        self.device_ids = self.output_device = None
        self.dim = dim
        self.forward_sync_buffers = (
            broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.static_graph = False
        self.bucket_bytes_cap = max(limits)
        self.require_backward_grad_sync = True
        self._divide_by_initial_world_size = True
        self._bucket_limits = limits
        self._buffers_may_differ = not init_sync
        if init_sync:
            options = {
                "bucket_cap_mb": [limit / (1 << 20) for limit in limits],
                "find_unused_parameters": find_unused_parameters,
                "broadcast_buffers": self.forward_sync_buffers,
                "static_graph": static_graph,
            }
            check_agreement(describe(module, options, self.parameters_to_ignore), group)
            with_buffers = self.forward_sync_buffers or forward_sync_buffers is not None
            broadcast_coalesced(self._state(with_buffers=with_buffers), group)
        self._make_reducer()
        if static_graph:
            self._set_static_graph()

    def _state(self, *, with_buffers: bool) -> list[torch.Tensor]:
        """The parameters, and the buffers if wanted, that are not ignored."""
        named: list[tuple[str, torch.Tensor]] = [*self.module.named_parameters()]
        if with_buffers:
            named += self.module.named_buffers()
        return [tensor for name, tensor in named if name not in self.parameters_to_ignore]

    def _make_reducer(self) -> None:
        """What is not copied or pickled: the reducer, what counts and logs its work, and buffers' places."""
        trained: dict[str, torch.Tensor] = {}
        sparse: list[bool] = []
        known: set[torch.Tensor] = set()
        for path, owner in self.module.named_modules():
            looks_up = isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and owner.sparse
            for name, parameter in owner.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                ignored = full in self.parameters_to_ignore or parameter in known
                if parameter.requires_grad and not ignored:
                    known.add(parameter)
                    trained[full] = parameter
                    sparse.append(looks_up)
        parameters = list(trained.values())
        plan, plan_limits = compute_bucket_assignment_by_size(parameters, self._bucket_limits, sparse)
        self._counters = Counters()
        # Gradients come last layer first.
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
        )
        self._buffer_broadcast = BufferBroadcast(self.module, self.process_group, self.parameters_to_ignore)
        self.logger = Logger(self.reducer, self.process_group)
        self.logger.set_construction_data(
            type(self.module).__name__,
            parameters,
            broadcast_buffers=self.forward_sync_buffers,
            bucket_cap_bytes=self.bucket_bytes_cap,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            has_sync_bn=any(type(each).__name__ == "SyncBatchNorm" for each in self.module.modules()),
        )

    # -- training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and have the gradients of what it returns averaged, unless in :meth:`no_sync`."""
        reducing = self.require_backward_grad_sync and torch.is_grad_enabled()
        root = 0
        if self._join_config.enable:
            root = begin_step(self, reducing)
        else:
            self.reducer.set_divisor(None)
        if reducing:
            self.logger.before_forward()
            try:
                self.reducer.prepare_for_forward()
            except DistError as error:
                self.logger.set_error(str(error))
                raise
        self._sync_buffers(reducing, root)
        output = self.module(*inputs, **kwargs)
        if reducing:
            counters = self._counters
            counters.forward_ns += time.perf_counter_ns() - counters.forward_started
            self.reducer.prepare_for_backward(output)
        return output

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are replaced by rank 0's."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

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

    def _sync_buffers(self, reducing: bool, root: int) -> None:
        """Before a forward pass: take the buffers of a rank, where they may differ."""
        if self.forward_sync_buffers and (reducing or self._buffers_may_differ) and self._buffer_broadcast:
            began = time.perf_counter_ns()
            self._buffer_broadcast.run(root)
            took = time.perf_counter_ns() - began
            self._counters.communication_ns += took
            self._counters.wait_ns += took
        self._buffers_may_differ = reducing

    # -- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs. Must be entered by all ranks.

        A rank that has run out of them takes part in the others' steps with gradients of zero. At the end all
        ranks take the state of the last that had inputs. See :class:`torchestra.algorithms.join.Join`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of ranks, so that every input
                has the same weight; if False, by the number of ranks that still have inputs.
            enable: if False, do nothing: when inputs are known to be even.
            throw_on_early_termination: raise an error on all ranks when one runs out of inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        """For a join context: what shadows the steps of this wrapper."""
        return DDPJoinHook(self, divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """For a join context: the CPU."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """For a join context: the group."""
        return self.process_group

    def _take_state_of(self, rank: int) -> None:
        broadcast_coalesced(self._state(with_buffers=self.forward_sync_buffers), self.process_group, rank)

    # -- how gradients are averaged

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average gradients in a way of your own. All ranks must do so, once, before the first backward.

        Args:
            state: handed to the hook, and nothing else done with it.
            hook: ``hook(state, bucket)`` is called when all gradients of a bucket are there, with a
                :class:`torchestra.GradBucket`. It returns a ``torch.futures.Future`` of a tensor with the
                averages, laid out as ``bucket.buffer()``; the buffer itself if you like. It has to divide by
                the number of ranks itself. ``work.get_future()`` holds a list: chain
                ``.then(lambda future: future.value()[0])``.

        Raises:
            InvalidArgumentError: the hook cannot be called, or is annotated as something else.
            GradientReductionError: there is a hook already, or gradients are being reduced.
        """
        try:
            check_comm_hook(hook)
            self.reducer.register_comm_hook(state, hook)
        except (InvalidArgumentError, GradientReductionError) as error:
            self._log_and_raise(error)
        self.logger.set("comm_hook", getattr(hook, "__qualname__", repr(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Average gradients by a hook that comes with the package; see :meth:`register_comm_hook`."""
        try:
            self.reducer.register_builtin_comm_hook(comm_hook_type)
        except (InvalidArgumentError, GradientReductionError) as error:
            self._log_and_raise(error)
        self.logger.set("comm_hook", str(comm_hook_type))

    def _set_static_graph(self) -> None:
        """Do what the argument ``static_graph`` does, before training begins."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        try:
            self.reducer.set_static_graph()
        except GradientReductionError as error:
            self._log_and_raise(error)
        self.static_graph = True
        self.logger.set("static_graph", 1)

    def _log_and_raise(self, error: DistError) -> NoReturn:
        self.logger.set_error(f"{type(error).__name__}: {error}")
        raise error

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Let a wrapper of ``module`` have nothing to do with these parameters and buffers.

        They are neither compared nor synchronised, and their gradients are not averaged.
        """
        ignored = set(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    # -- what it has done

    def statistics(self) -> DDPStatistics:
        """How much was reduced so far and where the time went, on this rank."""
        return self._counters.snapshot()

    def _get_ddp_logging_data(self) -> dict[str, LoggingValue]:
        """What this wrapper is and has done, in torch's fields."""
        return self.logger.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first ten steps, take logging data of every so-manieth; 100 unless set."""
        if sample_rate < 1:
            self._log_and_raise(
                InvalidArgumentError("DDP runtime logging sample rate should be equal or greater than 1")
            )
        self.logger.sample_rate = sample_rate

    def _check_reducer_finalized(self) -> None:
        """Raise a GradientReductionError if the last backward has left gradients out."""
        self.reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        """Have no part in backward any more, so that another wrapper can have it."""
        self.reducer.remove_autograd_hooks()

    def rebuild(self, process_group: AnyGroup | None = None) -> None:
        """Average over another group from now on, in place of one that has failed. By all of its ranks.

        A step that failed is forgotten. Nothing is sent: as some ranks may have ended the step and others
        not, broadcast the state of one of them (parameters, buffers, optimizer) before you go on.

        Args:
            process_group: the group; default: the default group, such as :meth:`ProcessGroup.shrink` made it.
        """
        self._update_process_group(default_group() if process_group is None else process_group)

    def _update_process_group(self, new_process_group: AnyGroup) -> None:
        """Average over another group from now on; also after a group has failed.

        On ranks that are not in it nothing happens.
        """
        if new_process_group.rank() >= 0:
            group = choose_group(new_process_group, None)
            self.process_group = group
            self.reducer.update_process_group(group)
            self._buffer_broadcast = BufferBroadcast(self.module, group, self.parameters_to_ignore)

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in ("process_group", "device_mesh", "reducer", "logger", "_counters", "_buffer_broadcast"):
            del state[name]
        state["_join_config"] = DISABLED
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = choose_group(None, None)
        self.device_mesh = None
        super().__setstate__(state)  # type: ignore[no-untyped-call]
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
