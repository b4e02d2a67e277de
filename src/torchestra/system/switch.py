"""The switch that makes programs of torch.distributed use torchestra, read from the environment."""

from __future__ import annotations

import os

from torchestra.errors import InvalidArgumentError

SWITCH_VARIABLE = "TORCHESTRA_FOR"
"""Names the backend of torch.distributed that torchestra replaces: ``gloo``, or nothing."""

SERVED_BACKENDS = ("gloo",)
"""The backends that it can name."""


def switched_backend() -> str | None:
    """Return the backend of torch.distributed that torchestra is to replace; None if the switch is off.

    Raises:
        InvalidArgumentError: the variable names something else.
    """
    backend = os.environ.get(SWITCH_VARIABLE, "").strip().lower()
    if not backend:
        return None
    if backend not in SERVED_BACKENDS:
        raise InvalidArgumentError(
            f"{SWITCH_VARIABLE}={backend!r}: torchestra can serve programs for"
            f' {" and ".join(SERVED_BACKENDS)}; set it to "gloo", or unset it'
        )
    return backend
