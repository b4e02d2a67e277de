"""torchestra for other libraries; apart from bridges, the only package that imports torch.distributed.

Its functions are loaded when they are first used: torch imports this package to register the backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchestra.interop.torch_distributed import adopt, debug_handlers, inner_group, use

__all__ = ["adopt", "debug_handlers", "inner_group", "use"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load the functions that need torch.distributed, on first access."""
        if name in __all__:
            return getattr(importlib.import_module(f"{__name__}.torch_distributed"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
