"""Run by ``import torch``, which finds it by the entry point in the group ``torch.backends``.

It makes the backend's name known to torch.distributed and imports nothing that is not loaded already: the
engine is loaded when a group is made. Whatever goes wrong here, torch is imported all the same.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torchestra.interop.registration import BACKEND, register_backend


def autoload() -> None:
    """Register the backend if this torch has torch.distributed; a failure is only warned of."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return  # torch was built without it
    try:
        register()
    except Exception as error:
        warnings.warn(
            f'torchestra could not register its backend "{BACKEND}" with torch.distributed: {error!r}',
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Make the backend known, without loading the engine."""
    register_backend(_create)


def _create(options: Any, backend_options: Any) -> Any:
    from torchestra.interop.torch_distributed.group import create_group  # loads the engine

    return create_group(options, backend_options)
