"""The mark of the functions of this package that workers call on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
TAKES_AGENT = "_torchestra_takes_agent"


def takes_agent(function: F) -> F:
    """Mark a function of the package: the agent that executes a call of it passes itself first.

    So functions that workers call on each other need no global to find the worker.
    """
    setattr(function, TAKES_AGENT, True)
    return function
