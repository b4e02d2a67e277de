"""torch's debug level, kept for programs that read it: torchestra always has the checks that it enables.

Errors always show the fingerprints of calls that do not match, and name unused parameters.
"""

from __future__ import annotations

import enum
import os

from torchestra.errors import InvalidArgumentError

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


class DebugLevel(enum.IntEnum):
    """How much torch checks and logs."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_level = DebugLevel.OFF


def get_debug_level() -> DebugLevel:
    """Return the level of this process."""
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Change the level of this process."""
    global _level
    _level = DebugLevel(level)


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
