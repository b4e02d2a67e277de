"""As ``torch.distributed.nn``; of its functions, those of torchestra.functional are the counterpart."""

from __future__ import annotations

from torchestra.nn import RemoteModule

__all__ = ["RemoteModule"]
