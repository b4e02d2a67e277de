"""Stores of torchestra.compat and of torch: of the same calls the same results, errors and state."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from compared import SIDES, Outcome, assert_same, outcome, quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Call = tuple[str, tuple[Any, ...]]

SHORT = timedelta(milliseconds=20)  # for waits in vain
LONG = timedelta(seconds=100)  # for all else: a server on a busy machine may take long to answer
KEYS = st.sampled_from(["a", "b", "", "é", b"a"])
NUMBERS = st.sampled_from(["n", "m"])
QUEUES = st.sampled_from(["q", "r"])
ANY_KEY = st.one_of(KEYS, NUMBERS, QUEUES, st.just("nowhere"))
VALUES = st.sampled_from(["x", "", "7", b"\xff\x00", b"x", "é"])
LISTS = st.lists(ANY_KEY, max_size=3)
# torch's TCPStore gives b"" for the key of a queue, and its stores do not delete queues.
OF_VALUES = st.one_of(KEYS, NUMBERS, st.just("nowhere"))
WRONG = st.sampled_from([3, None, 1.5, ["a"]])


def calls(*shapes: tuple[str, tuple[st.SearchStrategy[Any], ...]]) -> st.SearchStrategy[Call]:
    return st.one_of([st.tuples(st.just(name), st.tuples(*arguments)) for name, arguments in shapes])


PROGRAMS = st.lists(
    calls(
        ("set", (KEYS, VALUES)),
        ("set", (WRONG, VALUES)),
        ("set", (KEYS, WRONG)),
        ("set", (KEYS,)),
        ("get", (OF_VALUES,)),
        ("get", (WRONG,)),
        ("add", (NUMBERS, st.sampled_from([0, 1, -5, 2**40, True, 2**63, "1", 1.5]))),
        ("append", (KEYS, VALUES)),
        ("compare_set", (KEYS, VALUES, VALUES)),
        ("check", (LISTS,)),
        ("check", (st.sampled_from(["a", b"a", 3, None, {"a"}, ("a", "b")]),)),
        ("wait", (LISTS,)),
        ("wait", (LISTS, st.just(SHORT))),
        ("multi_get", (st.lists(OF_VALUES, max_size=3),)),
        ("multi_set", (st.just(["a", "b"]), st.tuples(VALUES, VALUES).map(list))),
        ("delete_key", (OF_VALUES,)),
        ("num_keys", ()),
        ("list_keys", ()),
        ("queue_push", (QUEUES, VALUES)),
        ("queue_pop", (QUEUES,)),
        ("queue_pop", (QUEUES, st.just(False))),
        ("queue_len", (QUEUES,)),
        ("has_extended_api", ()),
        ("set_timeout", (st.sampled_from([timedelta(seconds=99), 99.5, 98, "1", None]),)),
    ),
    max_size=25,
)


def file_store(side: Any) -> Any:
    return side.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)


STORES: dict[str, Callable[[Any], Any]] = {
    "hash": lambda side: side.HashStore(),
    "file": file_store,
    "tcp": lambda side: side.TCPStore("localhost", 0, 1, True),
    "tcp without libuv": lambda side: side.TCPStore("localhost", 0, None, True, use_libuv=False),
    "prefix of hash": lambda side: side.PrefixStore("p", side.HashStore()),
    "prefix of file": lambda side: side.PrefixStore("p", file_store(side)),
    "prefix of prefix of tcp": lambda side: side.PrefixStore(
        "p", side.PrefixStore("", side.TCPStore("localhost", 0, 1, True))
    ),
}


def call(store: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    result = getattr(store, name)(*arguments)
    return sorted(result) if name == "list_keys" else result


def waits_in_vain(store: Any, name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call waits for a key that nobody sets, which in a file takes torch a second."""
    if name == "queue_pop" and len(arguments) == 1:
        return outcome(store.queue_len, *arguments).value == 0
    if name not in ("get", "wait", "multi_get"):
        return False
    keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
    try:
        return not store.check(keys)
    except TypeError:
        return False


def call_in_time(store: Any, name: str, arguments: tuple[Any, ...], in_vain: bool) -> Outcome:
    """Make a call with the time-out that it needs, and leave the store its own."""
    if in_vain:
        own = store.timeout
        store.set_timeout(SHORT)
        try:
            return outcome(call, store, name, arguments)
        finally:
            store.set_timeout(own)
    if name == "wait" and len(arguments) == 2:
        arguments = (arguments[0], LONG)
    return outcome(call, store, name, arguments)


@pytest.mark.parametrize("kind", STORES)
@given(program=PROGRAMS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_programs(kind: str, program: list[Call]) -> None:
    theirs, ours = (STORES[kind](side) for side in SIDES)
    with quiet():
        for store in (theirs, ours):
            store.set_timeout(LONG)
        for number, (name, arguments) in enumerate([*program, ("list_keys", ()), ("num_keys", ())]):
            in_vain = waits_in_vain(theirs, name, arguments)
            if "file" in kind and in_vain:
                continue
            outcomes = [call_in_time(store, name, arguments, in_vain) for store in (theirs, ours)]
            assert_same(f"{kind}: {[*program[:number], (name, arguments)]}", *outcomes)
        assert theirs.timeout == ours.timeout


WAITS_IN_VAIN: list[Call] = [
    ("get", ("nowhere",)),
    ("wait", (["a", "nowhere"],)),
    ("wait", (["nowhere"], timedelta(milliseconds=5))),
    ("multi_get", (["nowhere", "a"],)),
]


@pytest.mark.parametrize("kind", ["file", "prefix of file"])
def test_waits_in_vain_for_a_key_in_a_file(kind: str) -> None:
    def wait_in_vain(case: tuple[Any, Call]) -> Any:
        side, (name, arguments) = case
        store = STORES[kind](side)
        store.set_timeout(SHORT)
        store.set("a", "1")
        return outcome(call, store, name, arguments)

    cases = [(side, each) for each in WAITS_IN_VAIN for side in SIDES]
    with quiet(), ThreadPoolExecutor(len(cases)) as threads:
        told = list(threads.map(wait_in_vain, cases))
    for each, theirs, ours in zip(WAITS_IN_VAIN, told[::2], told[1::2], strict=True):
        assert theirs.errors
        assert_same(f"{kind}: {each}", theirs, ours)


def python_store(side: Any, methods: frozenset[str]) -> Any:
    """A subclass of Store in Python with some of the methods, which notes what is called."""

    class Noting(side.Store):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[str, bytes] = {}
            self.noted: list[Any] = []

    def set_(self: Any, key: str, value: Any) -> None:
        self.noted.append(("set", key, type(value)))
        self.held[key] = value.encode() if isinstance(value, str) else value

    def get(self: Any, key: str) -> bytes:
        self.noted.append(("get", key))
        return self.held[key]

    def add(self: Any, key: str, amount: int) -> int:
        self.held[key] = str(int(self.held.get(key, b"0")) + amount).encode()
        return int(self.held[key])

    def compare_set(self: Any, key: str, expected: Any, desired: Any) -> bytes:
        expected, desired = (each.encode() if isinstance(each, str) else each for each in (expected, desired))
        held = self.held.get(key)
        if (held or b"") == expected:
            self.held[key] = desired
            return desired
        return expected if held is None else held

    def check(self: Any, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def delete_key(self: Any, key: str) -> bool:
        return self.held.pop(key, None) is not None

    def num_keys(self: Any) -> int:
        return len(self.held)

    bodies = [set_, get, add, compare_set, check, delete_key, num_keys]
    for body in bodies:
        name = body.__name__.rstrip("_")
        if name in methods:
            setattr(Noting, name, body)
    return Noting()


METHODS = ("set", "get", "add", "compare_set", "check", "delete_key", "num_keys")


@given(
    methods=st.frozensets(st.sampled_from(METHODS), min_size=4),
    program=st.lists(
        calls(
            ("set", (st.just("a"), VALUES)),
            ("get", (st.sampled_from(["a", "b"]),)),
            ("add", (st.just("n"), st.integers(-3, 3))),
            ("append", (st.sampled_from(["a", "b"]), VALUES.filter(len))),
            ("multi_get", (st.just(["a"]),)),
            ("multi_set", (st.just(["a", "b"]), st.tuples(VALUES, VALUES).map(list))),
            ("check", (st.just(["a"]),)),
            ("compare_set", (st.just("a"), VALUES, VALUES)),
            ("delete_key", (st.just("a"),)),
            ("num_keys", ()),
            ("list_keys", ()),
            ("queue_push", (st.just("q"), VALUES)),
            ("queue_len", (st.just("q"),)),
            ("has_extended_api", ()),
        ),
        max_size=12,
    ),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_subclasses_in_python(methods: frozenset[str], program: list[Call]) -> None:
    """What a subclass must override, and what is made of what it has."""
    theirs, ours = (python_store(side, methods) for side in SIDES)
    for name, arguments in program:
        outcomes = [outcome(call, store, name, arguments) for store in (theirs, ours)]
        assert_same(f"{sorted(methods)} {program}: {name}{arguments}", *outcomes)
    assert theirs.held == ours.held
    assert theirs.noted == ours.noted


def both(make: Callable[[Any], Any]) -> None:
    with quiet():
        outcomes = [outcome(make, side) for side in SIDES]
    assert_same("", *outcomes)


def test_an_address_in_use() -> None:
    with socket.create_server(("localhost", 0)) as server:
        both(lambda side: side.TCPStore("localhost", server.getsockname()[1], 1, True))

    def twice(side: Any) -> Any:
        first = side.TCPStore("localhost", 0, None, True)
        return side.TCPStore("localhost", first.port, None, True)

    both(twice)


def test_two_masters_share_a_server_that_is_for_several() -> None:
    def twice(side: Any) -> Any:
        first = side.TCPStore("localhost", 0, None, True, multi_tenant=True)
        second = side.TCPStore("localhost", first.port, None, True, multi_tenant=True)
        first.set("a", "1")
        return second.get("a"), first.libuvBackend, second.num_keys(), first.host

    both(twice)


@pytest.mark.parametrize("wanted", [True, False])
def test_which_server_was_asked_for(wanted: bool) -> None:
    both(lambda side: side.TCPStore("localhost", 0, None, True, use_libuv=wanted).libuvBackend)


@pytest.mark.parametrize(
    "arguments",
    [
        ("localhost", 1, None, False, SHORT),
        ("localhost", 0, 1, True, 5),
        ("localhost",),
    ],
)
def test_tcp_stores_that_cannot_be_had(arguments: tuple[Any, ...]) -> None:
    both(lambda side: side.TCPStore(*arguments))


def test_a_tcp_store_that_waits_for_a_client_in_vain() -> None:
    """On a busy machine the time is over while torch's own client still connects: then a DistNetworkError."""
    for side in SIDES:
        with quiet():
            told = outcome(side.TCPStore, "localhost", 0, 2, True, SHORT)
        assert set(told.errors) & {"DistStoreError", "DistNetworkError"}, (side.__name__, told)


def test_what_stores_of_one_file_see() -> None:
    def stores(side: Any) -> Any:
        path = os.path.join(tempfile.mkdtemp(), "store")
        first, second = side.FileStore(path, 2), side.FileStore(path, 2)
        first.set("a", "1")
        seen = [second.get("a"), second.num_keys(), sorted(second.list_keys()), first.path == path]
        del first
        seen.append(second.check(["a"]))
        del second
        seen.append(os.path.exists(path))
        return seen

    both(stores)


def test_what_lies_below_prefixes() -> None:
    def below(side: Any) -> Any:
        store = side.HashStore()
        inner = side.PrefixStore("p", store)
        outer = side.PrefixStore("q", inner)
        outer.set("a", "1")
        return [
            outer._underlying_non_prefix_store is store,
            outer.underlying_store is inner,
            inner.underlying_store is store,
            store.list_keys(),
            outer.list_keys(),
            outer.num_keys(),
            [isinstance(outer, kind) for kind in (side.Store, side.PrefixStore, side.HashStore)],
        ]

    both(below)
    both(lambda side: side.PrefixStore("p", None))
    both(lambda side: side.PrefixStore(3, side.HashStore()))


def test_clones() -> None:
    def clones(side: Any) -> Any:
        store = side.HashStore()
        twin = store.clone()
        store.set("a", "1")
        store.set_timeout(SHORT)
        return twin.get("a"), type(twin).__name__, twin.num_keys()

    both(clones)
