"""The store in which Gloo's ends find each other, over one of ours.

Each end puts its endpoint there, and asks for the others' one by one: that would be O(ends²) requests. So end
0 joins all endpoints, and the others read the result: each end makes three requests, however many there are.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torchestra.engine.multihost.bridge import BridgeError
from torchestra.errors import StoreTimeoutError
from torchestra.store import Store
from torchestra.store.unreadable import reading, unpacked
from torchestra.system.deadline import Deadline

_MAX_BYTES = 1 << 28  # of all addresses, before they are packed
_POLL_SECONDS = 0.2
_ALL = "endpoints"


class _GlooEndpoints:
    """One end's view of the endpoints of Gloo's ends in the store.

    Attributes:
        known: by key, the endpoints of all ends, once this one has put its own into the store.
    """

    def __init__(
        self, store: Store, end: int, size: int, timeout_s: float, is_closed: Callable[[], bool]
    ) -> None:
        self.store = store.clone()
        self.store.set_timeout(timeout_s)
        self.known: dict[str, bytes] = {}
        self._end, self._size, self._timeout_s, self._is_closed = end, size, timeout_s, is_closed

    def unknown(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.known]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = Deadline(self._timeout_s if timeout is None else timeout.total_seconds())
        while not self._is_closed():
            remaining = deadline.remaining()
            try:
                return self.store.wait(keys, max(0.001, min(_POLL_SECONDS, remaining)))
            except StoreTimeoutError:
                if remaining <= _POLL_SECONDS:
                    raise
        raise BridgeError("this end is closed")

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        if self.known or not key.endswith(f"/{self._end}"):
            return
        stem = key.removesuffix(str(self._end))
        keys = [f"{stem}{each}" for each in range(self._size)]
        if self._end == 0:
            self.wait(keys)
            values = self.store.multi_get(keys)
            self.store.set(stem + _ALL, zlib.compress(b"\n".join(map(base64.b64encode, values))))
        else:
            self.wait([stem + _ALL])
            text = self.store.get(stem + _ALL)
            with reading("the addresses of Gloo's connections"):
                values = [base64.b64decode(line) for line in unpacked(text, _MAX_BYTES).split(b"\n")]
                if len(values) != len(keys):
                    raise ValueError(f"{len(values)} addresses of {len(keys)}")
        self.known.update(zip(keys, values, strict=True))


def store_for_gloo(store: Store, end: int, size: int, timeout_s: float, is_closed: Callable[[], bool]) -> Any:
    """Return a store of torch.distributed.

    Args:
        store: one that only these ends, and only for this purpose, use.
        end, size: which end this is, and how many there are.
        is_closed: waits end with a BridgeError when this is true.
    """
    from torch._C._distributed_c10d import Store as TorchsStore

    endpoints = _GlooEndpoints(store, end, size, timeout_s, is_closed)

    class Adapter(TorchsStore):
        def set(self, key: str, value: Any) -> None:
            endpoints.set(key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return endpoints.known[key] if key in endpoints.known else endpoints.store.get(key)

        def add(self, key: str, amount: int) -> int:
            return endpoints.store.add(key, amount)

        def check(self, keys: list[str]) -> bool:
            unknown = endpoints.unknown(keys)
            return not unknown or endpoints.store.check(unknown)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            if unknown := endpoints.unknown(keys):
                endpoints.wait(unknown, timeout)

    return Adapter()
