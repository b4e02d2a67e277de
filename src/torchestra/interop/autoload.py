"""The hook that ``import torch`` runs, found by the entry point in the group ``torch.backends``.

It registers the backend's name with torch.distributed, makes torchestra serve "gloo" if the environment says
so (switch.py), and imports no modules that are not loaded already: the engine is loaded when a group is made.
If the name cannot be registered, torch is imported all the same; a switch that cannot be turned on as
requested is an error.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torchestra.interop.registration import BACKEND, register_backend
from torchestra.interop.switch import turn_on
from torchestra.system.switch import switched_backend


def autoload() -> None:
    """Register the backend if this torch has torch.distributed, and turn the switch on if requested.

    Raises:
        InvalidArgumentError: the environment requests something that torchestra does not serve.
    """
    asked = switched_backend()
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return  # torch was built without it
    try:
        register()
    except Exception as error:
        if asked is not None:
            raise
        warnings.warn(
            f'torchestra could not register its backend "{BACKEND}" with torch.distributed: {error!r}',
            RuntimeWarning,
            stacklevel=2,
        )
    if asked is not None:
        turn_on()


def turn_on_switch() -> None:
    """Import torch, and make torchestra serve "gloo" whether or not torch has called :func:`autoload`."""
    import torch.distributed

    if not torch.distributed.is_available():
        raise RuntimeError("this torch was built without torch.distributed, so there is nothing to serve")
    register()
    turn_on()


def register() -> None:
    """Register the backend, without loading the engine."""
    register_backend(_create)


def _create(options: Any, backend_options: Any) -> Any:
    from torchestra.interop.torch_distributed.group import create_group  # loads the engine

    return create_group(options, backend_options)
