"""Rendezvous by URLs of a program's own schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown

Handler = Callable[..., Iterator[Any]]
"""Takes a URL and ``timeout`` (a timedelta); yields ``(store, rank, world_size)`` whenever ranks meet."""

BUILT_IN = ("env", "tcp", "file")
_registered: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Make ``init_process_group`` use ``handler`` where ``init_method`` is a URL of ``scheme``.

    Every rank calls it, before ``init_process_group``.

    Args:
        scheme: the part of the URL before ``://``.
        handler: a generator function. It is called with the URL, which has ``rank`` and ``world_size`` in its
            query where they were given, and with ``timeout`` (a timedelta); it yields ``(store, rank,
            world_size)``.

    Raises:
        InvalidArgumentError: the scheme has a handler already, as ``env``, ``tcp`` and ``file`` do.
    """
    if not isinstance(scheme, str) or not callable(handler):
        raise InvalidArgumentTypeError(
            "register_rendezvous_handler: `scheme` must be a str, and `handler` callable, got"
            f" {shown(scheme)} and {shown(handler)}"
        )
    if scheme in BUILT_IN or scheme in _registered:
        raise InvalidArgumentError(f"Rendezvous handler for {scheme}:// already registered")
    _registered[scheme] = handler


def handler_of(scheme: str) -> Handler | None:
    """Return the handler that the program has registered for a scheme."""
    return _registered.get(scheme)


def with_rank(url: str, rank: int, world_size: int) -> str:
    """Return a URL with the rank and the world size added to its query, unless they are -1."""
    given = {name: number for name, number in (("rank", rank), ("world_size", world_size)) if number != -1}
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), **given})))
