"""Imports with Python's garbage collector disabled.

An import makes many objects that stay. The collector sees their number grow and searches every object of the
process for garbage, torch's half a million included, in vain: 0.1 s, half of torchestra's import time.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any


def without_collection(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that calls ``load`` with the collector disabled."""

    @functools.wraps(load)
    def get(name: str) -> Any:
        if not gc.isenabled():
            return load(name)
        gc.disable()
        try:
            return load(name)
        finally:
            gc.enable()

    return get
