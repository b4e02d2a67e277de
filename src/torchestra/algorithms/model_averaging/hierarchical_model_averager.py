"""Averages parameters often among few ranks, and seldom among many.

Wang et al., "Demystifying Why Local Aggregation Helps: Convergence Analysis of Hierarchical SGD" (AAAI 2022),
https://arxiv.org/abs/2010.12998.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torchestra.algorithms.model_averaging.averagers import ModelAverager, check_warmup, warn_of_period_one
from torchestra.algorithms.model_averaging.parameters import (
    Parameters,
    average_parameters_or_parameter_groups,
)
from torchestra.errors import InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.world.init import AnyGroup, member_group
from torchestra.world.subgroups import new_subgroups

__all__ = ["HierarchicalModelAverager"]

_log = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager):
    """Averages in each step that is a multiple of a period, in the group of the largest such period.

    The groups of a size are consecutive ranks of ``process_group``. All of its ranks must construct the
    averager, since this makes the groups.

    Args:
        period_group_size_dict: for each period, how many ranks average; both grow, and the last size is that
            of ``process_group``. ``{2: 2, 4: 8}``: pairs in steps 2, 6, 10, ..., eight ranks in 0, 4, 8, ...
        warmup_steps: the first step that may average.
        process_group: the ranks; None: the default group.

    Attributes:
        period_process_group_dict: for each period, the group in which this rank averages.

    Raises:
        InvalidArgumentError: periods or sizes are not as described above.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: AnyGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise InvalidArgumentError("Arg ``period_group_size_dict`` must not be empty.")
        group = member_group(self.process_group, "HierarchicalModelAverager")
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        if periods[0] <= 0:
            raise InvalidArgumentError(
                "The minimum period in arg ``period_group_size_dict`` must be a positive value. Got"
                f" {periods[0]}"
            )
        if sizes[-1] != group.size():
            raise InvalidArgumentError(
                f"The last value in arg ``period_group_size_dict`` {sizes[-1]} must be equal to the size of"
                f" arg ``process_group`` {group.size()}."
            )
        if periods != sorted(periods) or sizes != sorted(sizes):
            raise InvalidArgumentError(
                "Periods and group sizes in arg ``period_group_size_dict`` must grow. Got"
                f" {dict(period_group_size_dict)}"
            )
        check_warmup(warmup_steps)
        if periods[-1] == 1:
            warn_of_period_one("the maximum period in arg ``period_group_size_dict``")
        self.warmup_steps = warmup_steps
        self._periods = periods
        self.period_process_group_dict: dict[int, ProcessGroup] = {}
        for period, size in zip(periods, sizes, strict=True):
            _log.info("Each group of %s ranks averages parameters every %s steps", size, period)
            part: AnyGroup = group
            if size != group.size():
                part, _ = new_subgroups(size, group)
            assert isinstance(part, ProcessGroup), "this rank is in one of the parts"
            self.period_process_group_dict[period] = part

    def average_parameters(self, params: Parameters) -> None:
        if self.step >= self.warmup_steps and (group := self._find_process_group()) is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def _find_process_group(self) -> ProcessGroup | None:
        """Return the group in which the current step averages, if it does."""
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None
