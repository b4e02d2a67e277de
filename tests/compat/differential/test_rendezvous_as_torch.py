"""Rendezvous URLs and handlers: torchestra.compat and torch give the same stores, ranks and errors."""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from compared import SIDES, assert_same, outcome, quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchestra
from torchestra.store import HashStore
from torchestra.world.registry import thread_rank

RENDEZVOUS: list[ModuleType] = [importlib.import_module(f"{side.__name__}.rendezvous") for side in SIDES]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USE_LIBUV")
_fresh = itertools.count()


def meet(module: ModuleType, url: Any, rank: Any, world_size: Any) -> Any:
    """Meet once: of what kind the store is and what it counts, and the numbers."""
    given_url = url.replace("DIRECTORY", tempfile.mkdtemp()) if isinstance(url, str) else url
    met = module.rendezvous(given_url, rank, world_size, timeout=timedelta(seconds=20))
    store, rank, world_size = next(iter(met))
    return type(store).__name__, store.num_keys(), getattr(store, "libuvBackend", None), rank, world_size


@given(
    place=st.sampled_from(
        [
            "tcp://localhost:0",
            "tcp://localhost",
            "tcp://",
            "file://DIRECTORY/f",
            "file://",
            "foo://x",
            "nothing",
            "",
            "env://",
        ]
    ),
    query=st.dictionaries(
        st.sampled_from(["rank", "world_size", "use_libuv", "other"]),
        st.sampled_from(["0", "1", "a"]),
        max_size=3,
    ),
    rank=st.sampled_from([-1, -1, 0, "0"]),
    world_size=st.sampled_from([-1, -1, 1, None]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_urls(place: str, query: dict[str, str], rank: Any, world_size: Any) -> None:
    if query.get("world_size") == "0" or query.get("rank") == "1":
        return  # torch makes a store for a world that cannot be, or waits for rank 0
    url = place + ("?" + "&".join(f"{name}={value}" for name, value in query.items()) if query else "")
    with pytest.MonkeyPatch.context() as environment, quiet():
        for name in VARIABLES:
            environment.delenv(name, raising=False)
        outcomes = [outcome(meet, module, url, rank, world_size) for module in RENDEZVOUS]
    assert_same((url, rank, world_size), *outcomes)


@pytest.mark.parametrize("left_out", ["", *VARIABLES[:4]])
@pytest.mark.parametrize("libuv", ["", "0", "1"])
def test_the_environment(left_out: str, libuv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "USE_LIBUV": libuv,
    }
    for name, value in values.items():
        if value and name != left_out:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    assert_same(values, *[outcome(meet, module, "env://", -1, -1) for module in RENDEZVOUS])


@pytest.mark.parametrize("url", [None, 3, ["env://"]])
def test_what_is_no_url(url: Any) -> None:
    assert_same(url, *[outcome(meet, module, url, 0, 1) for module in RENDEZVOUS])


def test_handlers_of_programs() -> None:
    """They get the URL with rank and world size in it; a scheme has one only."""
    scheme = f"scheme{next(_fresh)}"

    def tried(side: Any, module: ModuleType) -> Any:
        urls: list[Any] = []

        def handler(url: str, **kwargs: Any) -> Iterator[Any]:
            urls.append((url, kwargs))
            yield side.HashStore(), 0, 1

        module.register_rendezvous_handler(scheme, handler)
        met = [meet(module, f"{scheme}://place", *numbers) for numbers in ((-1, -1), (0, 1), (-1, 1))]
        refused = [
            "RuntimeError" in outcome(module.register_rendezvous_handler, name, handler).errors
            for name in (scheme, "env", "tcp", "file")
        ]
        return met, urls, refused

    assert_same(
        "",
        *[outcome(tried, side, module) for side, module in zip(SIDES, RENDEZVOUS, strict=True)],
    )


def test_a_world_is_made_by_a_handler() -> None:
    """Of the native name, too, and with what the handler says of rank and world size."""
    scheme = f"scheme{next(_fresh)}"

    def handler(url: str, **kwargs: Any) -> Iterator[Any]:
        yield HashStore(), 0, 1

    torchestra.register_rendezvous_handler(scheme, handler)
    with thread_rank(0, 1, HashStore()):
        torchestra.init_process_group(init_method=f"{scheme}://anywhere")
        assert (torchestra.get_rank(), torchestra.get_world_size()) == (0, 1)
