"""torch's debug level. Most of what it turns on in torch is always on here.

Errors always show the calls of ranks that do not match, and name unused parameters. At level DETAIL an
asynchronous operation is waited for where it is called, so that calls which do not match are raised there, as
by the wrapper that torch puts around groups.
"""

from __future__ import annotations

import enum
import os

from torchestra.communicator.queue import OperationQueue
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.process_group import ProcessGroup
from torchestra.store import Store
from torchestra.types import Timeout

__all__ = [
    "DebugLevel",
    "_create_process_group_wrapper",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
]

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(enum.IntEnum):
    """How much torch checks and logs."""

    OFF = 0
    INFO = 1
    DETAIL = 2

    __str__ = enum.Enum.__str__  # with the name, as torch's, in every version of Python


_level = DebugLevel.OFF


def get_debug_level() -> DebugLevel:
    """Return the level of this process."""
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Change the level of this process; it concerns operations that are called from now on."""
    global _level
    _level = DebugLevel(level)
    OperationQueue.raises_at_call = _level is DebugLevel.DETAIL


def _create_process_group_wrapper(
    wrapped_pg: ProcessGroup,
    store_prefix: str = "",
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    timeout: Timeout | None = None,
) -> ProcessGroup:
    """Have a group raise mismatches where its operations are called, whatever the level; return it.

    torch's other arguments are for a second group, which compares the ranks' calls: not needed here.

    Raises:
        DistBackendError: the group is of a registered backend, whose calls torchestra does not compare.
    """
    if wrapped_pg.communicator.engine.delegates:
        raise DistBackendError(
            f"_create_process_group_wrapper: calls of {wrapped_pg!r} are not compared, since a"
            " registered backend runs them; the debug level DETAIL concerns groups of torchestra"
        )
    wrapped_pg.communicator.queue.raises_at_call = True
    return wrapped_pg


def set_debug_level_from_env() -> None:
    """Take the level from the environment variable TORCH_DISTRIBUTED_DEBUG; OFF if it is not set.

    Raises:
        InvalidArgumentError: the variable is none of OFF, INFO and DETAIL (in any case).
    """
    text = os.environ.get(_VARIABLE, "")
    try:
        set_debug_level(DebugLevel[text.upper()] if text else DebugLevel.OFF)
    except KeyError:
        raise InvalidArgumentError(
            f"The value of {_VARIABLE} must be one of `OFF`, `INFO`, or `DETAIL`, got {text!r}"
        ) from None


set_debug_level_from_env()
