"""The heartbeat bound: the time for which a host may be silent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from torchestra.errors import InvalidArgumentError

HEARTBEAT_VARIABLE = "TORCHESTRA_HEARTBEAT"
"""How many seconds a host may be silent before it is given up; the same for all ranks."""

_DEFAULT_BOUND = 10.0


def heartbeat_bound(variables: Mapping[str, str] = os.environ) -> float:
    """Return how long a host may be silent, in seconds.

    Args:
        variables: of the environment of the job's ranks.

    Raises:
        InvalidArgumentError: the environment says something that is no number of seconds.
    """
    text = variables.get(HEARTBEAT_VARIABLE)
    try:
        bound = _DEFAULT_BOUND if not text else float(text)
    except ValueError:
        bound = -1.0
    if not 0 < bound < math.inf:
        raise InvalidArgumentError(f"{HEARTBEAT_VARIABLE} must be a number of seconds, got {text!r}")
    return bound
