"""From a group of torch.distributed to the group of torchestra that it runs on."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed

from torchestra.errors import InvalidArgumentError, NotInitializedError
from torchestra.interop.torch_distributed.group import TorchestraGroup
from torchestra.process_group import ProcessGroup


def inner_group(group: distributed.ProcessGroup | None = None) -> ProcessGroup:
    """Return the :class:`torchestra.ProcessGroup` that a group of torch.distributed runs on.

    Its ranks, memory, statistics and operations can be used with torch.distributed's, in one order.

    Args:
        group: default: the default group.

    Raises:
        NotInitializedError: torch.distributed has no default group.
        InvalidArgumentError: the group has another backend.
    """
    return _torchestra_group(group).inner


def monitored_barrier(
    group: distributed.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of the group have called this; else rank 0 tells which are missing.

    ``torch.distributed.monitored_barrier`` does the same for a group of torchestra.

    Args:
        group: default: the default group.
        timeout: how long rank 0 waits; default: the group's.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        RuntimeError: not all ranks called this in time, or some are dead.
        InvalidArgumentError: the group has another backend.
    """
    _torchestra_group(group).monitored_barrier(timeout, wait_all_ranks)


def _torchestra_group(group: distributed.ProcessGroup | None) -> TorchestraGroup:
    chosen = distributed.group.WORLD if group is None else group
    if chosen is None:
        raise NotInitializedError(
            "torch.distributed has no default group: call torch.distributed.init_process_group() first"
        )
    if not isinstance(chosen, TorchestraGroup):
        raise InvalidArgumentError(f'{chosen!r} is not a group of backend "torchestra"')
    return chosen
