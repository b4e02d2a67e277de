"""Whether references that are left at a graceful shutdown are an error."""

from __future__ import annotations

ignored: bool = True
