"""The contract of stores, as checks that any implementation can run.

:func:`check_store` runs them all; ``CHECKS`` has them one by one, for pytest to name. Each check is given a
new, empty store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest

from torchestra.errors import InvalidArgumentError, QueueEmptyError, StoreTimeoutError
from torchestra.store import Store

T = TypeVar("T")
Check = Callable[[Store], None]

OPTIONAL = frozenset({"append", "delete_key", "list_keys", "queue_push"})
"""Methods that a store of one's own may leave out."""

CHECKS: dict[str, tuple[Check, str]] = {}
LONG = 60.0


def check_store(factory: Callable[[], Store], without: Iterable[str] = ()) -> None:
    """Runs every check on a new store each; ``without`` names the optional methods the store lacks."""
    for check, needs in CHECKS.values():
        if needs not in without:
            check(factory())


def promise(needs: str = "") -> Callable[[Check], Check]:
    """Marks a check, and the optional method it needs."""

    def register(check: Check) -> Check:
        CHECKS[check.__name__] = (check, needs)
        return check

    return register


def at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """Return what ``work(0)``, ``work(1)``, ... return, all of them called at the same time."""
    start = threading.Barrier(count)

    def run(number: int) -> T:
        start.wait(LONG)
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


@promise()
def values_come_back_as_bytes(store: Store) -> None:
    binary = bytes(range(256))
    for given, expected in [
        ("text", b"text"),
        ("ü€", "ü€".encode()),
        (binary, binary),
        (bytearray(b"\0x"), b"\0x"),
        (memoryview(b"view"), b"view"),
        (b"", b""),
    ]:
        store.set("key", given)
        assert store.get("key") == expected
        assert store.check(["key"])


@promise()
def keys_may_be_any_text(store: Store) -> None:
    keys = ["", "a", "a/b", "a/b/", " ", "\n", "ключ", "x" * 5000, "a\0b"]
    for number, key in enumerate(keys):
        store.set(key, str(number))
    assert store.multi_get(keys) == [str(number).encode() for number in range(len(keys))]


@promise()
def a_get_waits_for_the_set(store: Store) -> None:
    def getter_or_setter(number: int) -> bytes | None:
        if number:
            return store.get("late")
        return store.set("late", "here")

    assert at_once(4, getter_or_setter) == [None, b"here", b"here", b"here"]


@promise()
def a_key_that_never_comes_is_an_error_with_names(store: Store) -> None:
    store.set("there", "1")
    store.set_timeout(0.03)
    for attempt in (lambda: store.get("never"), lambda: store.multi_get(["there", "never"])):
        with pytest.raises(StoreTimeoutError) as caught:
            attempt()
        assert "never'" in str(caught.value)
        assert "there'" not in str(caught.value)
        assert "after 30ms" in str(caught.value)
    assert store.get("there") == b"1"


@promise()
def a_wait_names_what_is_missing(store: Store) -> None:
    store.set("a", "1")
    for timeout in (0.02, timedelta(milliseconds=20)):
        with pytest.raises(StoreTimeoutError, match=r"after 20ms, keys: .*b', .*c' did not come to "):
            store.wait(["a", "b", "c"], timeout)
    store.multi_set(["b", "c"], ["2", "3"])
    store.wait(["a", "b", "c"], 0.0)
    store.wait([])


@promise()
def a_timed_out_wait_leaves_nothing_behind(store: Store) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            store.wait(["k"], 0.0)
    store.set("k", "v")
    assert store.get("k") == b"v"


@promise()
def a_wait_holds_up_nobody(store: Store) -> None:
    waiting = [threading.Thread(target=store.wait, args=([f"end/{n}"], LONG), daemon=True) for n in range(4)]
    for thread in waiting:
        thread.start()
    for number in range(20):
        store.set("k", str(number))
        assert store.get("k") == str(number).encode()
    assert all(thread.is_alive() for thread in waiting)
    for number, thread in enumerate(waiting):
        store.set(f"end/{number}", "")
        thread.join(LONG)
        assert not thread.is_alive()


@promise()
def check_asks_for_all(store: Store) -> None:
    store.set("a", "")
    assert store.check([]) is True
    assert store.check(["a"]) is True
    assert store.check(["a", "b"]) is False


@promise()
def add_counts_in_decimal_text(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", "41")
    assert store.add("n", 1) == 42
    assert store.add("n", 0) == 42


@promise()
def add_refuses_what_is_not_a_number(store: Store) -> None:
    store.set("word", "seven")
    with pytest.raises(InvalidArgumentError, match="'seven'"):
        store.add("word", 1)
    with pytest.raises(InvalidArgumentError, match=r"`amount` must be an int, got 1\.5"):
        store.add("n", 1.5)  # type: ignore[arg-type]
    assert store.get("word") == b"seven"


@promise()
def add_is_one_step(store: Store) -> None:
    seen = at_once(8, lambda _: [store.add("n", 1) for _ in range(25)])
    assert sorted(number for numbers in seen for number in numbers) == list(range(1, 201))


@promise()
def compare_set_compares(store: Store) -> None:
    assert store.compare_set("k", "expected", "x") == b"expected"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "", "x") == b"first"
    assert store.compare_set("k", "wrong", "x") == b"first"
    assert store.compare_set("k", b"first", b"\0second") == b"\0second"
    assert store.get("k") == b"\0second"


@promise()
def compare_set_has_one_winner(store: Store) -> None:
    answers = at_once(8, lambda number: store.compare_set("leader", "", str(number)))
    assert answers == [store.get("leader")] * 8


@promise()
def many_keys_at_a_time(store: Store) -> None:
    keys = [f"k{number}" for number in range(50)]
    store.multi_set(keys, [str(number) for number in range(50)])
    assert store.multi_get(keys[::-1]) == [str(number).encode() for number in range(49, -1, -1)]
    assert store.multi_get([]) == []
    with pytest.raises(InvalidArgumentError, match="2 keys, 1 values"):
        store.multi_set(["x", "y"], ["1"])
    assert not store.check(["x"])


@promise()
def values_may_be_large(store: Store) -> None:
    large = bytes(range(256)) * 4 * 4096
    store.set("large", large)
    store.set("next", "1")
    assert store.get("large") == large
    assert store.get("next") == b"1"


@promise()
def a_barrier_holds_until_all_have_come(store: Store) -> None:
    def pass_thrice(number: int) -> list[int]:
        seen = []
        for turn in range(3):
            store.add(f"came/{turn}", 1)
            store.barrier("b", 5, LONG)
            seen.append(store.add(f"came/{turn}", 0))
        return seen

    assert at_once(5, pass_thrice) == [[5, 5, 5]] * 5


@promise()
def a_barrier_says_how_many_came(store: Store) -> None:
    with pytest.raises(StoreTimeoutError, match=r"barrier 'b' of .*: 1 of 3 came within 0.02 s"):
        store.barrier("b", 3, 0.02)
    with pytest.raises(InvalidArgumentError, match="at least 1, got 0"):
        store.barrier("b", 0)


@promise()
def the_timeout_is_five_minutes_until_it_is_set(store: Store) -> None:
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(timedelta(seconds=2))
    assert store.timeout == timedelta(seconds=2)
    store.set_timeout(1.5)
    assert store.timeout == timedelta(seconds=1.5)
    for wrong in ("1", -1, True):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            store.set_timeout(wrong)  # type: ignore[arg-type]
    assert store.timeout == timedelta(seconds=1.5)


@promise()
def a_clone_shares_the_keys_and_not_the_timeout(store: Store) -> None:
    store.set_timeout(7)
    twin = store.clone()
    assert twin.timeout == timedelta(seconds=7)
    twin.set_timeout(9)
    assert store.timeout == timedelta(seconds=7)
    twin.set("from twin", "1")
    assert store.get("from twin") == b"1"
    store.set("to twin", "2")
    assert twin.get("to twin") == b"2"


@promise()
def wrong_arguments_change_nothing(store: Store) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: store.set(3, "x"),  # type: ignore[arg-type]
        lambda: store.set("k", 3),  # type: ignore[arg-type]
        lambda: store.set("\0k", "x"),
        lambda: store.wait("k"),
        lambda: store.check("k"),
        lambda: store.wait(["k"], "soon"),  # type: ignore[arg-type]
        lambda: store.multi_set("k", "v"),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidArgumentError):
            attempt()
    assert not store.check(["k"])


@promise("append")
def append_adds_at_the_end(store: Store) -> None:
    assert store.has_extended_api()
    store.append("a", "po")
    store.append("a", b"tato")
    assert store.get("a") == b"potato"
    at_once(6, lambda number: [store.append("b", str(number)) for _ in range(10)])
    assert sorted(store.get("b")) == sorted(b"012345" * 10)


@promise("delete_key")
def a_deleted_key_is_gone(store: Store) -> None:
    store.set("k", "1")
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert not store.check(["k"])
    with pytest.raises(StoreTimeoutError):
        store.wait(["k"], 0.01)
    assert store.add("k", 1) == 1


@promise("list_keys")
def only_the_users_keys_are_counted(store: Store) -> None:
    assert store.num_keys() == 0
    assert store.list_keys() == []
    store.set("a", "1")
    store.add("b", 1)
    store.set("a", "2")
    assert store.num_keys() == 2
    assert sorted(store.list_keys()) == ["a", "b"]


@promise("queue_push")
def a_queue_is_first_in_first_out(store: Store) -> None:
    assert store.queue_len("q") == 0
    for value in ("1", b"2", "3"):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert store.check(["q"])
    store.wait(["q"], 0.0)
    assert [store.queue_pop("q") for _ in range(3)] == [b"1", b"2", b"3"]
    assert not store.check(["q"])
    with pytest.raises(QueueEmptyError, match=r"'.*q' .* is empty"):
        store.queue_pop("q", block=False)


@promise("queue_push")
def a_pop_waits_and_gives_up(store: Store) -> None:
    store.set_timeout(0.02)
    with pytest.raises(StoreTimeoutError, match="q' did not come"):
        store.queue_pop("q")
    store.queue_push("q", "for the next")
    assert store.queue_pop("q") == b"for the next"


@promise("queue_push")
def every_value_is_popped_once(store: Store) -> None:
    store.set_timeout(LONG)

    def push_or_pop(number: int) -> list[bytes]:
        if number % 2:
            return [store.queue_pop("q") for _ in range(20)]
        for value in range(20):
            store.queue_push("q", f"{number}.{value}")
        return []

    popped = at_once(6, push_or_pop)
    expected = [f"{number}.{value}".encode() for number in (0, 2, 4) for value in range(20)]
    assert sorted(value for values in popped for value in values) == sorted(expected)
    assert store.queue_len("q") == 0


@promise("queue_push")
def a_value_and_a_queue_of_one_name_are_apart(store: Store) -> None:
    store.queue_push("k", "queued")
    store.set_timeout(0.01)
    with pytest.raises(StoreTimeoutError):
        store.get("k")
    store.set_timeout(LONG)
    store.set("k", "set")
    assert store.get("k") == b"set"
    assert store.queue_pop("k") == b"queued"


@promise()
def a_wait_ends_near_its_deadline(store: Store) -> None:
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        store.wait(["never"], 0.1)
    assert time.monotonic() - started >= 0.1
