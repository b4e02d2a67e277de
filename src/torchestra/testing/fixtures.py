"""Fixtures of tests that run on ranks: one value per rank, or one for the whole world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_MARK = "_torchestra_world"


def fixture(function: Callable[..., Any] | None = None, *, scope: str = "function", **options: Any) -> Any:
    """Decorate as ``pytest.fixture`` does; accepts ``scope="world"`` as well.

    In a test marked with ``ranks`` a fixture of function scope has its own value on every rank,
    made on that rank (inside its default group). With ``scope="world"`` it is made once per test, outside the
    ranks, and all of them get it: the same object where ranks are threads, pickled copies where they are
    processes. Fixtures of wider scopes are made once per process, so that thread ranks share them.
    """
    if function is None:
        return lambda decorated: fixture(decorated, scope=scope, **options)
    if scope != "world":
        return pytest.fixture(scope=scope, **options)(function)  # type: ignore[call-overload]
    setattr(function, _MARK, True)
    return pytest.fixture(**options)(function)


def is_shared_by_the_world(function: object) -> bool:
    """Return whether a fixture's function was given ``scope="world"``."""
    return getattr(function, _MARK, False) is True
