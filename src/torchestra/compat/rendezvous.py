"""As ``torch.distributed.rendezvous``: torch's three schemes, and those that a program registers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from torchestra.compat.stores import FileStore, Store, TCPStore
from torchestra.errors import InvalidArgumentError
from torchestra.rendezvous.handlers import Handler, handler_of, register_rendezvous_handler, with_rank
from torchestra.store import PrefixStore
from torchestra.store import Store as OwnStore
from torchestra.store.torch_agent import connect_to_agent
from torchestra.types import DEFAULT_TIMEOUT

__all__ = ["_create_store_from_options", "register_rendezvous_handler", "rendezvous"]

Met = tuple[OwnStore, int, int]


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
    """Return a generator that meets the other ranks and yields ``(store, rank, world_size)``.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or of a registered scheme.
        rank: this rank; -1: taken from the URL or the environment.
        world_size: how many ranks there are; -1: likewise.
        **kwargs: for the handler; ``timeout`` is a timedelta.

    Raises:
        RuntimeError: an argument is of the wrong type, or the scheme has no handler.
        AssertionError: rank or world size are given both in the URL and as arguments.
    """
    if not isinstance(url, (str, bytes)):
        raise RuntimeError(f"`url` must be a string. {type(url)}: {url}")
    for name, number in (("rank", rank), ("world_size", world_size)):
        if not isinstance(number, int):
            raise RuntimeError(f"`{name}` must be an integer. {number}")
    url = url.decode() if isinstance(url, bytes) else url
    parts = urlsplit(url)
    if (rank, world_size) != (-1, -1):
        if dict(parse_qsl(parts.query)).keys() & {"rank", "world_size"}:
            raise AssertionError(f"The url: {url} has node-specific arguments(rank, world_size) already.")
        url = with_rank(url, rank, world_size)
    handler = _TORCHS_OWN.get(parts.scheme) or handler_of(parts.scheme)
    if handler is None:
        raise RuntimeError(f"No rendezvous handler for {parts.scheme}://")
    return handler(url, **kwargs)


def _error(scheme: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {what}")


def _rank_and_size(scheme: str, query: dict[str, str]) -> tuple[int, int]:
    """Return the rank and world size in a URL's query."""
    for name, words in (("rank", "rank"), ("world_size", "world size")):
        if name not in query:
            raise _error(scheme, f"{words} parameter missing")
    return int(query["rank"]), int(query["world_size"])


def _by_file(url: str, **kwargs: Any) -> Iterator[Met]:
    parts = urlsplit(url)
    path = unquote(parts.netloc + parts.path)
    if not path:
        raise _error("file", "path missing")
    rank, world_size = _rank_and_size("file", dict(parse_qsl(parts.query)))
    yield FileStore(path, world_size), rank, world_size
    raise RuntimeError("Unable to perform rerendezvous using file:// method")


def _by_address(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[Met]:
    parts = urlsplit(url)
    if parts.port is None:
        raise _error("tcp", "port number missing")
    query = dict(parse_qsl(parts.query))
    rank, world_size = _rank_and_size("tcp", query)
    if parts.hostname is None:
        raise _error("tcp", "host missing")
    yield _c10d_store(parts.hostname, parts.port, rank, world_size, timeout, _libuv(query)), rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using tcp:// method")


def _by_environment(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[Met]:
    query = dict(parse_qsl(urlsplit(url).query))

    def variable(name: str) -> str:
        if not os.environ.get(name):
            raise _error("env", f"environment variable {name} expected, but not set")
        return os.environ[name]

    rank = int(query["rank"] if "rank" in query else variable("RANK"))
    world_size = int(query["world_size"] if "world_size" in query else variable("WORLD_SIZE"))
    host, port = variable("MASTER_ADDR"), int(variable("MASTER_PORT"))
    yield _c10d_store(host, port, rank, world_size, timeout, _libuv(query)), rank, world_size
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")


def _libuv(query: dict[str, str]) -> bool:
    return query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"


def _c10d_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool
) -> OwnStore:
    """Return the store that the ranks share: torchrun's agent has one, else rank 0 serves it."""
    if not 0 <= port < 1 << 16:
        raise InvalidArgumentError(f"port must have value from 0 to 65535 but was {port}.")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(
            f"/worker/attempt_{attempt}", connect_to_agent(host, port, timeout.total_seconds(), None)
        )
    return TCPStore(
        host, port, world_size, rank == 0, timeout=timeout, multi_tenant=True, use_libuv=use_libuv
    )


def _create_store_from_options(backend_options: Any, rank: int) -> Store:
    """Return the store for options that have ``init_method`` and ``world_size``."""
    store: Store = next(iter(rendezvous(backend_options.init_method, rank, backend_options.world_size)))[0]
    return store


_TORCHS_OWN: dict[str, Handler] = {"env": _by_environment, "file": _by_file, "tcp": _by_address}
