"""Shadows DistributedDataParallel's steps in a join context, on a rank that has run out of inputs.

The announcement of each step (algorithms/join.py) says whether the step's gradients will be averaged, so that
joined ranks know which collectives to take part in: the broadcast of buffers, from the first rank that still
has inputs, and a reduction of zeros. Where another joinable announces the steps, one more small all_reduce
says so.
"""

from __future__ import annotations

import torch

from torchestra.algorithms.join import Join, JoinHook
from torchestra.errors import InvalidArgumentError
from torchestra.nn.parallel.controls import Controls
from torchestra.types import ReduceOp

_QUIET = 1
"""The note of a step whose gradients are not averaged."""


def check_can_join(ddp: Controls) -> None:
    """Refuse a wrapper whose order of reductions a rank without inputs cannot know.

    Raises:
        InvalidArgumentError: it is one.
    """
    if ddp._delayed is not None and ddp.reducer.parameters:
        raise InvalidArgumentError(
            "DistributedDataParallel: a join context serves a wrapper with delay_all_reduce_named_params only"
            " if these are all of its parameters, since it cannot know when they are reduced among the"
            " others; leave the argument out, or give all ranks as many inputs and pass enable=False"
        )


def begin_step(ddp: Controls, averages: bool) -> int:
    """Announce a step, on a rank that has an input; return the rank whose buffers all ranks take."""
    check_can_join(ddp)
    Join.notify_join_context(ddp, note=0 if averages else _QUIET)
    config = ddp._join_config
    assert config.context is not None
    if not config.is_first_joinable:
        _announce(ddp, averages)
    _choose_divisor(ddp, config.context)
    return config.context.active[0]


def _choose_divisor(ddp: Controls, context: Join) -> None:
    set_divisor(ddp, None if ddp._divide_by_initial_world_size else len(context.active))


def set_divisor(ddp: Controls, divisor: int | None) -> None:
    """Divide sums of gradients by this, instead of the number of ranks (None)."""
    ddp.reducer.set_divisor(divisor)
    if ddp._delayed is not None:
        ddp._delayed.divisor = divisor


def _announce(ddp: Controls, averages: bool) -> bool:
    """Tell the joined ranks (or learn, as one of them) whether the step's gradients are averaged."""
    answer = torch.tensor([int(averages)], dtype=torch.int16)
    ddp.process_group.communicator.all_reduce(answer, ReduceOp.MAX)
    return bool(answer)


class DDPJoinHook(JoinHook):
    """Shadows the steps of a DistributedDataParallel.

    Args:
        ddp: the wrapper.
        divide_by_initial_world_size: divide sums of gradients by the number of all ranks, not of those that
            still have inputs.
    """

    def __init__(self, ddp: Controls, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp.logger.set("join_uneven_inputs", 1)

    def main_hook(self) -> None:
        """Take part in the collectives of one step."""
        ddp = self._ddp
        context = ddp._join_config.context
        assert context is not None
        averages = context.note != _QUIET if ddp._join_config.is_first_joinable else _announce(ddp, False)
        ddp._sync_buffers(averages, context.active[0])
        if averages:
            _choose_divisor(ddp, context)
            # Another joinable, such as an optimizer, may go on with the averages on this rank too.
            write_back = len(context.joinables) > 1
            if ddp._delayed is not None:
                ddp._delayed.shadow(write_back=write_back)
            ddp.reducer.shadow_round(write_back=write_back)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the state of the last rank that had inputs."""
        ddp = self._ddp
        set_divisor(ddp, None)
        last = torch.tensor([ddp.process_group.rank() if is_last_joiner else -1])
        ddp.process_group.communicator.all_reduce(last, ReduceOp.MAX)
        ddp._take_state_of(int(last))
