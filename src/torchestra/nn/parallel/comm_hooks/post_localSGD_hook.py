"""Averages gradients over all ranks at first, then only over the ranks of a host.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020), https://arxiv.org/abs/1808.07217. Once
gradients are averaged locally, parameters must be averaged periodically, by
:mod:`torchestra.algorithms.model_averaging` or :class:`torchestra.optim.PostLocalSGDOptimizer`.
"""

from __future__ import annotations

import logging

import torch

from torchestra.nn.parallel.comm_hooks.debugging_hooks import noop_hook
from torchestra.nn.parallel.comm_hooks.default_hooks import average, member
from torchestra.nn.parallel.comm_hooks.hosts import same_host
from torchestra.nn.parallel.comm_hooks.interface import GradBucket
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

_log = logging.getLogger(__name__)


class PostLocalSGDState:
    """The state of :func:`post_localSGD_hook`.

    Args:
        process_group: the ranks that average at first; None: the default group.
        subgroup: the ranks that average locally afterwards. None: those of this rank's host; the group is
            made when it is first needed.
        start_localSGD_iter: the first step of local SGD.
        post_local_gradient_allreduce: if False, local SGD does not average gradients at all.

    Attributes:
        iter: the number of steps before local SGD began.
    """

    def __init__(
        self,
        process_group: AnyGroup | None,
        subgroup: AnyGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        _log.info("Local SGD will be started after %s iterations", start_localSGD_iter)
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._made_subgroup = False

    def subgroup_here(self) -> ProcessGroup:
        """Return the group that averages locally. All ranks of ``process_group`` must make the first call."""
        if self.subgroup is None:
            self.subgroup, self._made_subgroup = same_host(member(self.process_group)), True
        return member(self.subgroup)

    def on_rebuild(self) -> None:
        """Count steps from 0: the wrapper's group was replaced. The host's subgroup is made anew."""
        self.iter = 0
        if self._made_subgroup:
            self.subgroup, self._made_subgroup = None, False

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                _log.info("Start to apply local SGD after %s iterations.", self.iter)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over all ranks; from step ``state.start_localSGD_iter`` on, over the subgroup."""
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average(member(state.process_group), bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return average(state.subgroup_here(), bucket.buffer())
