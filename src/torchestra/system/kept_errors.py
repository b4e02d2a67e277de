"""Exceptions that an object keeps to raise them later, perhaps more than once, in other threads."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import torch

from torchestra.errors import DistError


class _Trace(Exception):
    """The cause of an exception: the traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def without_frames(error: BaseException) -> BaseException:
    """Return the exception without tracebacks, which keep all variables of the operation alive.

    These include the object that holds the exception, and the group's memory. Our own errors name their
    origin; others get their traceback as text.
    """
    if error.__traceback__ is not None and not isinstance(error, DistError):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        error.__cause__ = _Trace(text)
        error.__context__ = None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def fresh(error: BaseException) -> BaseException:
    """Return a copy of an exception to raise, so that the kept one does not refer to the catcher's frames."""
    try:
        copied = copy.copy(error)
    except Exception:
        return error  # its class cannot be copied
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied


def _raise_fresh(error: BaseException) -> None:
    raise fresh(error)


def fail_future(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Set an error as the outcome of a future; who asks for its value has a copy of it raised.

    torch's ``set_exception()`` raises the exception itself, so it comes to refer to the frames of whoever
    caught it. If these refer to the future, as they mostly do, it stays for ever: Python's garbage collector
    does not see what a future of torch's refers to.
    """
    future._set_unwrap_func(_raise_fresh)
    future.set_result(without_frames(error))
