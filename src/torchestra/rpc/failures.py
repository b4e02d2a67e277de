"""How the exception of a function on one worker becomes one at the caller."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from torchestra.errors import RemoteError


def describe(error: BaseException, worker: str) -> tuple[bytes | None, str]:
    """An exception for the way: its class and attributes where they can be pickled, and what to say."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"On {worker}:\n{_say(error)}\n{lines}"
    for attributes in (dict(vars(error)), {}):
        attributes.pop("__notes__", None)
        try:
            return pickle.dumps((type(error), attributes), 5), text
        except Exception:
            continue
    return None, text


def _say(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def rebuild(described: bytes | None, text: str) -> BaseException:
    """The exception to raise at the caller: of the same class where that exists here."""
    remote = RemoteError(text)
    if described is None:
        return remote
    try:
        kind, attributes = pickle.loads(described)
        error = _made(kind, text)
        vars(error).update(attributes)
    except Exception:
        return remote
    if not isinstance(error, Exception):  # SystemExit there shall not end anything here
        return remote
    error.__cause__ = remote
    return error


def _made(kind: Any, text: str) -> BaseException:
    error: BaseException = kind.__new__(kind, text)
    error.args = (text,)
    return error
