"""ZeroRedundancyOptimizer: each rank keeps the optimizer's state of some parameters, and updates those.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020),
https://arxiv.org/abs/1910.02054, stage 1 (P_os).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchestra.algorithms.join import Join, Joinable, JoinHook
from torchestra.errors import InvalidArgumentError, NotReadyError
from torchestra.optim.overlap import OverlapPlan
from torchestra.optim.parameter_lists import check_same_type, listed
from torchestra.optim.shards import Partition, Shards, partition
from torchestra.optim.states import collect_states, global_state, local_state, part_of_state
from torchestra.optim.subset import check_steps_without_closure
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, member_group

_log = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose state is divided between the ranks of a group.

    Every rank passes all parameters, and computes all gradients (DistributedDataParallel averages them). In
    :meth:`step` each rank updates its share of the parameters, then all ranks exchange the updated ones. A
    parameter belongs to one rank as a whole; the shares are about equally large.

    It is a joinable: with ``Join([model, optimizer])`` a rank without inputs goes on updating its share, by
    its current gradients.

    Args:
        params: parameters, or parameter groups, the same on every rank.
        optimizer_class: the class of the optimizer that updates a rank's share.
        process_group: the ranks; None: the default group.
        parameters_as_bucket_view: move the parameters of each rank into one tensor, which is exchanged
            without copies: faster. (``parameter.data`` is replaced by a view of it.)
        overlap_with_ddp: update parameters while backward goes on, as soon as their gradients are averaged:
            register a hook made by :mod:`torchestra.nn.parallel.comm_hooks.ddp_zero_hook`, and do not call
            :meth:`step`. The shares are buckets of the model, or parts of buckets, so nothing is updated
            until the model's buckets are final, that is in the first two or three steps.
        **defaults: options for ``optimizer_class``.

    Attributes:
        optim: this rank's optimizer.
        exchange_in_step: whether :meth:`step` calls :meth:`exchange`; if set to False the caller does.
        rank, world_size, global_rank: this rank's number in the group, the group's size, and its number in
            the default group.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: the parameters or the optimizer are not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: AnyGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        given, every = listed(params)
        check_same_type(every)
        group = member_group(process_group, "ZeroRedundancyOptimizer")
        if overlap_with_ddp:
            check_steps_without_closure(optimizer_class)
        self.initialized = False
        Optimizer.__init__(self, given, defaults)
        Joinable.__init__(self)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.exchange_in_step = True
        self.overlap = OverlapPlan(self) if overlap_with_ddp else None
        self._optimizer_class = optimizer_class
        self._begin(group)
        if self.overlap is not None and parameters_as_bucket_view:
            _log.warning(
                "`parameters_as_bucket_view=True` will be ignored since `overlap_with_ddp=True`; instead, a"
                " different bucketing strategy will be used"
            )
        self.initialized = True

    def rebuild(self, process_group: AnyGroup | None = None) -> None:
        """Divide the parameters anew, between the ranks of another group, all of which must call it.

        For use after :meth:`ProcessGroup.shrink`. Nothing is sent. The state on ranks that are gone is lost,
        and shares change, so the optimizer's state begins anew; options such as the learning rate stay. To
        continue from a saved state, call :meth:`load_state_dict` on all ranks (with ``overlap_with_ddp``,
        when the model's buckets are final again).

        Args:
            process_group: the group; default: the default group.

        Raises:
            InvalidArgumentError: this rank is not in the group.
        """
        group = member_group(process_group, "ZeroRedundancyOptimizer")
        if self.overlap is not None:
            self.overlap.reset()
        self._begin(group)

    def _begin(self, group: ProcessGroup) -> None:
        """Divide the parameters between the ranks of a group, and begin with no state."""
        self.process_group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.global_rank = group.to_global_rank(self.rank)
        self._loads = [0] * self.world_size
        # For each rank, for each parameter group, its parameters.
        self._shares: list[Partition] = [[] for _ in range(self.world_size)]
        self._held: Partition | None = None
        self._shards: Shards | None = None
        self._trainable: list[bool] = []
        self._collected: list[dict[str, Any]] = []
        self._optim: Optimizer | None = None
        if self.overlap is None:
            for each in self.param_groups:
                self._divide(each)
            self.build_local_optimizer()

    def hold(
        self,
        holders: Mapping[torch.Tensor, Sequence[int]],
        process_group: AnyGroup | None = None,
    ) -> None:
        """Divide the parameters anew, each to one or several ranks, which all update it alike.

        With several, a parameter's state is not lost with one rank; :mod:`torchestra.elastic` keeps replicas
        so. Must be called by all ranks, with the same holders. Nothing is sent: the state of parameters that
        this rank has stays, if it still holds them.

        Args:
            holders: of each parameter, in the group's numbering; the first one sends it in :meth:`exchange`.
            process_group: the group; default: the default group.

        Raises:
            InvalidArgumentError: this rank is not in the group, or ``overlap_with_ddp`` divides by itself.
        """
        group = member_group(process_group, "ZeroRedundancyOptimizer")
        if self.overlap is not None:
            raise InvalidArgumentError(
                "ZeroRedundancyOptimizer.hold: `overlap_with_ddp=True` divides the parameters by itself"
            )
        states = self.optim.state
        self._begin(group)
        lists = [each["params"] for each in self.param_groups]
        self._shares = [
            [[each for each in one if holders[each][0] == rank] for one in lists]
            for rank in range(self.world_size)
        ]
        self._held = [[each for each in one if self.rank in holders[each]] for one in lists]
        self.build_local_optimizer()
        for parameter in (each for one in self._held for each in one):
            if parameter in states:
                self.optim.state[parameter] = states[parameter]

    # -- shares

    @property
    def _local(self) -> Partition:
        """Return the parameters of this rank's optimizer, by group."""
        return self._shares[self.rank] if self._held is None else self._held

    @property
    def optim(self) -> Optimizer:
        """This rank's optimizer.

        Raises:
            NotReadyError: with ``overlap_with_ddp``, while the model's buckets are not final.
        """
        if self._optim is None:
            raise NotReadyError(
                "This method should not be called until this ZeroRedundancyOptimizer instance has been fully"
                " initialized: with overlap_with_ddp=True, when the model has made its first two or three"
                " steps with the hook"
            )
        return self._optim

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return, for each rank, the parameter groups that it updates and sends."""
        return [self._with_parameters(shares) for shares in self._shares]

    def _with_parameters(self, share: Partition) -> list[dict[str, Any]]:
        return [{**group, "params": part} for group, part in zip(self.param_groups, share, strict=True)]

    def _divide(self, group: dict[str, Any]) -> None:
        for rank, share in enumerate(partition(group["params"], self._loads)):
            self._shares[rank].append(share)

    def assign(self, shares: Partition) -> None:
        """Assign these parameters, and no others, to the ranks that update them; for ``overlap_with_ddp``.

        Raises:
            InvalidArgumentError: there are several parameter groups, or unknown parameters.
        """
        if len(self.param_groups) != 1:
            raise InvalidArgumentError(
                "ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter group,"
                f" got {len(self.param_groups)}"
            )
        known = {id(parameter) for parameter in self.param_groups[0]["params"]}
        if any(id(parameter) not in known for share in shares for parameter in share):
            raise InvalidArgumentError(
                "the model has a parameter that was not passed into the ZeroRedundancyOptimizer constructor"
            )
        self._shares = [[share] for share in shares]
        self.build_local_optimizer()

    def build_local_optimizer(self) -> None:
        """Make this rank's optimizer, for its share of the parameters."""
        self._optim = self._optimizer_class(self._with_parameters(self._local), **self.defaults)
        _copy_options(self._optim, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Must be called by all ranks, with the same ones.

        Raises:
            NotReadyError: with ``overlap_with_ddp``, which supports one parameter group only.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        if self.overlap is not None:
            raise NotReadyError(
                "ZeroRedundancyOptimizer with `overlap_with_ddp=True` only supports a single parameter group"
            )
        super().add_param_group(param_group)
        self._divide(self.param_groups[-1])
        # Parameters added before stay on their ranks, and so does their state.
        if self._held is not None:
            self._held.append(self._shares[self.rank][-1])
        self.optim.add_param_group(self._with_parameters(self._local)[-1])
        self._shards = None
        self._collected = []  # of fewer parameters

    def follow_options(self) -> None:
        """Give this rank's optimizer the options of ``param_groups``, which may have been changed."""
        _copy_options(self, self.optim)

    # -- steps

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's share, and exchange updated parameters. Must be called by all ranks.

        Args:
            closure: evaluates the model and returns the loss.
            **kwargs: passed to this rank's optimizer.

        Returns:
            The result of this rank's optimizer. None with ``overlap_with_ddp``, where this does nothing.

        Raises:
            UnevenInputsError, JoinInterruptedError: see :class:`~torchestra.algorithms.join.Join`.
        """
        if self.overlap is not None:
            _log.warning("`step()` should not be included in the training loop when `overlap_with_ddp=True`")
            return None
        Join.notify_join_context(self)
        self.follow_options()
        loss: float | None = (
            self.optim.step(**kwargs) if closure is None else self.optim.step(closure, **kwargs)
        )
        _copy_options(self.optim, self)  # where the optimizer changes them itself
        if self.exchange_in_step:
            self.exchange()
        return loss

    def exchange(self) -> None:
        """Receive the parameters that other ranks have updated, as :meth:`step` does at its end.

        Must be called by all ranks. May be repeated, as it changes nothing of what this rank updates.
        """
        trainable = [parameter.requires_grad for group in self.param_groups for parameter in group["params"]]
        if self._shards is None or trainable != self._trainable:
            self._trainable = trainable
            trained = [
                [parameter for share in shares for parameter in share if parameter.requires_grad]
                for shares in self._shares
            ]
            self._shards = Shards(trained, self.process_group, as_views=self.parameters_as_bucket_view)
        self._shards.exchange()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that steps, so that ranks that still have inputs get this rank's share."""
        return _ZeroJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """Return the device of the first parameter."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Return the group that the state is divided between."""
        return self.process_group

    # -- state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on one rank, for :meth:`state_dict`. Must be called by all ranks.

        Args:
            to: the rank, in the group's numbering.

        Raises:
            NotReadyError: with ``overlap_with_ddp``, while nothing was updated yet.
        """
        self.follow_options()
        local = part_of_state(self.optim.state_dict(), self._local, self._shares[self.rank])
        self._collected = collect_states(local, to, self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the last consolidated state, as an optimizer on a single rank would return it.

        Raises:
            NotReadyError: it was not consolidated on this rank.
        """
        _ = self.optim  # raises while nothing was updated yet
        if not self._collected:
            raise NotReadyError(
                "Optimizer state has not been consolidated on this rank. Please call"
                f" `consolidate_state_dict(to={self.rank})` on all ranks beforehand if you meant to save the"
                " global state."
            )
        return global_state(self.param_groups, self._shares, self._collected)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, or of an ordinary optimizer's ``state_dict()``.

        All ranks must call it; each loads the part of its share. ``state_dict`` is not changed.

        Raises:
            InvalidArgumentError: the state has other parameter groups than this optimizer.
            NotReadyError: with ``overlap_with_ddp``, while nothing was updated yet.
        """
        local = self.optim
        local.load_state_dict(local_state(self.param_groups, self._local, state_dict))
        _copy_options(self.optim, self)


class _ZeroJoinHook(JoinHook):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        # With the overlap, the model's hook updates parameters.
        if self._zero.overlap is None:
            self._zero.step()


def _copy_options(source: Optimizer, target: Optimizer) -> None:
    """Give the parameter groups of one optimizer the options of another's."""
    for source_group, target_group in zip(source.param_groups, target.param_groups, strict=True):
        target_group.update((key, value) for key, value in source_group.items() if key != "params")
