"""A store for protocols that are searched: each request is one operation, on a fact of the world.

``reads_apart``: values that are asked for together are read one by one, as from a store of torch's under
torchrun (store/torch_agent.py); else as one request, as torchestra's stores do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchestra.store.base import Store, Value, encode_value
from torchestra.types import Timeout
from verification.protocols.replay import perform
from verification.protocols.world import ProtocolWorld

EMPTY: frozenset[tuple[str, bytes]] = frozenset()


class ModelStore(Store):
    """A client of the store.

    Args:
        reads_apart: see above.
        made: keys that are made at once, as nobody can tell when they come to be: those that are only ever
            read together, by ranks that have made them first.
    """

    def __init__(self, reads_apart: bool = False, made: Iterable[str] = ()) -> None:
        self._reads_apart, self._made = reads_apart, tuple(made)

    def clone(self) -> ModelStore:
        return self

    def set_timeout(self, timeout: Timeout) -> None:
        """Do nothing: no request waits."""

    def set(self, key: str, value: Value) -> None:
        perform("sets", key, encode_value(value))

    def get(self, key: str) -> bytes:
        return bytes(perform("gets", key))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        expected, desired = encode_value(expected_value), encode_value(desired_value)
        if not desired and key.rstrip("0123456789") in self._made:
            perform("makes", key)
            return b""
        return bytes(perform("compares", key, expected, desired))

    def append(self, key: str, value: Value) -> None:
        perform("appends", key, encode_value(value))

    def add(self, key: str, amount: int) -> int:
        return int(perform("adds", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(perform("checks", *keys))

    def delete_key(self, key: str) -> bool:
        return bool(perform("deletes", key))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        if not perform("checks", *keys):
            raise TimeoutError

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if self._reads_apart:
            return [self.get(key) for key in keys]
        return list(perform("gets together", *keys))


def _change(world: ProtocolWorld, key: str, value: bytes | None) -> None:
    values = dict(world.facts["store"])
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value
    world.facts["store"] = frozenset(values.items())


def _value(world: ProtocolWorld, key: str) -> bytes:
    return bytes(dict(world.facts["store"]).get(key, b""))


def _set(world: ProtocolWorld, rank: int, choice: Any, key: str, value: bytes) -> None:
    _change(world, key, value)


def _get(world: ProtocolWorld, rank: int, choice: Any, key: str) -> bytes:
    return bytes(dict(world.facts["store"])[key])


def _get_together(world: ProtocolWorld, rank: int, choice: Any, *keys: str) -> tuple[bytes, ...]:
    values = dict(world.facts["store"])
    return tuple(values[key] for key in keys)


def _has_all(world: ProtocolWorld, rank: int, *keys: str) -> Iterable[Any]:
    """Who asks for values waits until all are there."""
    found = dict(world.facts["store"])
    return ("",) if all(key in found for key in keys) else ()


def _make(world: ProtocolWorld, rank: int, choice: Any, key: str) -> None:
    if key not in dict(world.facts["store"]):
        _change(world, key, b"")


def _compare(
    world: ProtocolWorld, rank: int, choice: Any, key: str, expected: bytes, desired: bytes
) -> bytes:
    values = dict(world.facts["store"])
    if key not in values and expected:
        return expected
    if values.get(key, b"") == expected:
        _change(world, key, desired)
        return desired
    return bytes(values[key])


def _append(world: ProtocolWorld, rank: int, choice: Any, key: str, value: bytes) -> None:
    _change(world, key, _value(world, key) + value)


def _add(world: ProtocolWorld, rank: int, choice: Any, key: str, amount: int) -> int:
    number = int(_value(world, key) or b"0") + amount
    _change(world, key, str(number).encode())
    return number


def _check(world: ProtocolWorld, rank: int, choice: Any, *keys: str) -> bool:
    return dict(world.facts["store"]).keys() >= set(keys)


def _delete(world: ProtocolWorld, rank: int, choice: Any, key: str) -> bool:
    was_there = key in dict(world.facts["store"])
    _change(world, key, None)
    return was_there


SERVICES: dict[str, Any] = {
    "sets": _set,
    "gets": _get,
    "gets together": _get_together,
    "makes": _make,
    "compares": _compare,
    "appends": _append,
    "adds": _add,
    "checks": _check,
    "deletes": _delete,
}
CHOICES: dict[str, Any] = {"gets": _has_all, "gets together": _has_all}
AT_ONCE = frozenset({"makes"})
