"""One of our stores, adapted to torch's store class."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torchestra.store import Store


def store_for_torch(store: Store, seconds: float) -> Any:
    """Return a store of torch.distributed over one of ours, for use from any thread.

    The caller must keep it alive as long as its users: torch holds only the half that is in C++.

    Args:
        seconds: how long a wait may last.
    """
    from torch._C._distributed_c10d import Store as TorchsStore

    store = store.clone()
    store.set_timeout(seconds)

    class Adapter(TorchsStore):
        def set(self, key: str, value: Any) -> None:
            store.set(key, value if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return store.get(key)

        def add(self, key: str, amount: int) -> int:
            return store.add(key, amount)

        def check(self, keys: list[str]) -> bool:
            return store.check(keys)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            store.wait(keys, seconds if timeout is None else timeout.total_seconds())

        def delete_key(self, key: str) -> bool:
            return store.delete_key(key)

        def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
            return store.compare_set(key, expected_value, desired_value)

    return Adapter()
