"""The store that Gloo's ends find each other in, over one of ours.

Each end puts its card there, which says where it listens, and asks for the others' one by one: that would be
as many requests, for all ends together, as the square of their number. So end 0 puts all cards together,
packed, and the others read that: each end makes three requests, however many there are.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torchestra.engine.multihost.bridge import BridgeError
from torchestra.errors import StoreTimeoutError
from torchestra.store import Store

__all__ = ["store_for_gloo"]

_LOOK_SECONDS = 0.2
_ALL = "cards"


def store_for_gloo(store: Store, end: int, size: int, timeout_s: float, is_closed: Callable[[], bool]) -> Any:
    """A store of torch.distributed.

    Args:
        store: one that only these ends, and only for this purpose, use.
        end, size: which end this is, and how many there are.
        timeout_s: how long a wait may last.
        is_closed: waits end with a BridgeError when this is true.
    """
    from torch._C._distributed_c10d import Store as TorchsStore

    store = store.clone()
    store.set_timeout(timeout_s)
    cards: dict[str, bytes] = {}

    def wait(keys: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_closed():
            remaining = deadline - time.monotonic()
            try:
                return store.wait(keys, max(0.001, min(_LOOK_SECONDS, remaining)))
            except StoreTimeoutError:
                if remaining <= _LOOK_SECONDS:
                    raise
        raise BridgeError("this end is closed")

    def hand_out(own_key: str, own: bytes) -> None:
        """Put this end's card into the store, and have everybody's."""
        stem = own_key.removesuffix(str(end))
        keys = [f"{stem}{each}" for each in range(size)]
        store.set(own_key, own)
        if end == 0:
            wait(keys, timeout_s)
            values = store.multi_get(keys)
            store.set(stem + _ALL, zlib.compress(b"\n".join(map(base64.b64encode, values))))
        else:
            wait([stem + _ALL], timeout_s)
            packed = zlib.decompress(store.get(stem + _ALL))
            values = [base64.b64decode(line) for line in packed.split(b"\n")]
        cards.update(zip(keys, values, strict=True))

    class Adapter(TorchsStore):
        def set(self, key: str, value: Any) -> None:
            raw = value.encode() if isinstance(value, str) else bytes(value)
            if key.endswith(f"/{end}") and not cards:
                hand_out(key, raw)
            else:
                store.set(key, raw)

        def get(self, key: str) -> bytes:
            return cards[key] if key in cards else store.get(key)

        def add(self, key: str, amount: int) -> int:
            return store.add(key, amount)

        def check(self, keys: list[str]) -> bool:
            unknown = [key for key in keys if key not in cards]
            return not unknown or store.check(unknown)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            if unknown := [key for key in keys if key not in cards]:
                wait(unknown, timeout_s if timeout is None else timeout.total_seconds())

    return Adapter()
