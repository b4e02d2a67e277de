"""Every kind of store keeps every promise of the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from replicas import StoreWithReplicas
from store_contract import CHECKS, OPTIONAL, check_store

from torchestra.errors import InvalidArgumentError
from torchestra.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from torchestra.store.base import Value, check_integer, check_key, check_keys, encode_value
from torchestra.store.torch_agent import TorchStore


class OwnStore(Store):
    """As little as a user has to write."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: Value) -> None:
        with self._lock:
            self._values[check_key(key)] = encode_value(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            held = self._values.get(key, b"0")
            try:
                total = int(held) + check_integer("amount", amount)
            except ValueError as error:
                raise InvalidArgumentError(f"{held.decode()!r}: {error}") from error
            self._values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        with self._lock:
            if self._values.get(key, b"") == encode_value(expected_value):
                self._values[key] = encode_value(desired_value)
            return self._values.get(key, encode_value(expected_value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in check_keys(keys))


def hash_store(path: Path) -> Store:
    return HashStore()


def file_store(path: Path) -> Store:
    return FileStore(path / "store", 1)


def tcp_store(path: Path) -> Store:
    return TCPStore("127.0.0.1", 0, is_master=True)


def unix_store(path: Path) -> Store:
    return TCPStore(f"unix:@{path}", 0, is_master=True)


def secret_store(path: Path) -> Store:
    return TCPStore("localhost", 0, 1, is_master=True, secret="between us")


def replicated_store(path: Path) -> Store:
    return StoreWithReplicas(3)


def own_store(path: Path) -> Store:
    return OwnStore()


def torch_store(path: Path) -> Store:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300))
    return TorchStore(store)


def prefixed(make: Callable[[Path], Store]) -> Callable[[Path], Store]:
    return lambda path: PrefixStore("inner", PrefixStore("outer", make(path)))


KINDS: dict[str, tuple[Callable[[Path], Store], frozenset[str]]] = {
    "hash": (hash_store, frozenset()),
    "file": (file_store, frozenset()),
    "tcp": (tcp_store, frozenset()),
    "unix": (unix_store, frozenset()),
    "tcp with a secret": (secret_store, frozenset()),
    "replicated": (replicated_store, frozenset()),
    "own": (own_store, OPTIONAL),
    "torch's": (torch_store, frozenset({"queue_push"})),
    "prefix over hash": (prefixed(hash_store), frozenset()),
    "prefix over file": (prefixed(file_store), frozenset()),
    "prefix over tcp": (prefixed(tcp_store), frozenset()),
    "prefix over replicated": (prefixed(replicated_store), frozenset()),
    "prefix over own": (prefixed(own_store), OPTIONAL),
}


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (kind, check)
        for kind, (_, without) in KINDS.items()
        for check in CHECKS
        if CHECKS[check][1] not in without
    ],
)
def test_store(kind: str, check: str, tmp_path: Path) -> None:
    store = KINDS[kind][0](tmp_path)
    CHECKS[check][0](store)
    store.close()


def test_the_contract_is_one_call_for_the_author_of_a_store() -> None:
    check_store(OwnStore, without=OPTIONAL)


def test_the_contract_notices_a_store_that_breaks_a_promise() -> None:
    class Forgetful(HashStore):
        def add(self, key: str, amount: int) -> int:
            return amount

    with pytest.raises(AssertionError):
        check_store(Forgetful)


def test_what_a_store_lacks_is_said_by_name() -> None:
    store = OwnStore()
    for attempt in (lambda: store.append("a", "b"), lambda: store.delete_key("a"), store.num_keys):
        with pytest.raises(NotImplementedError, match="OwnStore does not support"):
            attempt()
    assert not store.has_extended_api()
