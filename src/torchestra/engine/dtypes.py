"""The codes of dtypes in fingerprints and messages, by torch.dtype."""

from __future__ import annotations

import torch

from torchestra.engine.operations import DTYPE_BYTES

DTYPE_CODE: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(DTYPE_BYTES) if hasattr(torch, name)
}
DTYPES: tuple[torch.dtype, ...] = tuple(DTYPE_CODE)
