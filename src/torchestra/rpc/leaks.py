"""A setting: whether references left at a graceful shutdown are an error."""

from __future__ import annotations

ignored: bool = True
"""Whether a graceful shutdown lets references that are still in use pass; else it raises, and names them."""
