"""A store for a single rank: it never waits."""

from __future__ import annotations

from collections.abc import Sequence

from torchestra.arguments.annotations import checked_methods
from torchestra.store.base import check_keys
from torchestra.store.hash import HashStore
from torchestra.types import Timeout


@checked_methods
class FakeStore(HashStore):
    """The store of a fake world (``init_process_group("fake", store=FakeStore(), …)``).

    It keeps the values that are set. Every other key, which a rank that does not exist would have set, counts
    as present and empty, so that programs which synchronize through their store go on.
    """

    def check(self, keys: Sequence[str]) -> bool:
        check_keys(keys)
        return True

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        check_keys(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        keys = check_keys(keys)
        with self._lock:
            return [self._table.get(key) or b"" for key in keys]

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if self.queue_len(key) == 0 and block:
            return b""
        return super().queue_pop(key, block)
