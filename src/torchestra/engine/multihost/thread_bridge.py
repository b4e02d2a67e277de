"""A bridge among threads of one process, which pretend to be on several hosts: for tests."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from torchestra.engine.multihost.bridge import Bridge, BridgeError, PeerTensors
from torchestra.store import Store


class _Rail:
    """The ends' common state: the tensors sent, by sender and receiver, and the ends that have left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.sent: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.left: set[int] = set()


_rails: dict[str, _Rail] = {}
_making = threading.Lock()


class _Awaited:
    """See Pending. ``expected`` are by end: which of its messages, and where it is to be."""

    def __init__(self, rail: _Rail, host: int, expected: list[tuple[int, int, torch.Tensor]]) -> None:
        self._rail, self._host, self._expected = rail, host, expected

    def wait(self, timeout_s: float) -> bool:
        rail, deadline = self._rail, time.monotonic() + timeout_s
        with rail.changed:
            while self._expected:
                end, index, buffer = self._expected[0]
                sent = rail.sent[end, self._host]
                if index < len(sent):
                    buffer[: sent[index].numel()].copy_(sent[index])
                    sent[index] = sent[index][:0]
                    self._expected.pop(0)
                    continue
                if gone := rail.left & {end, self._host}:
                    raise BridgeError(f"host {min(gone)} has closed its end")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                rail.changed.wait(remaining)
        return True

    def awaited(self) -> Sequence[int]:
        return [end for end, _, _ in self._expected]


class ThreadBridge(Bridge):
    """See Bridge. The ends must be threads of one process, and ``store`` one that only they use."""

    kind = "threads"

    def __init__(self, store: Store, host: int, size: int) -> None:
        super().__init__(host, size)
        self._token = store.compare_set("rail", "", secrets.token_hex(16)).decode()
        self._counts: Counter[int] = Counter()
        with _making:
            self._rail = _rails.setdefault(self._token, _Rail(size))

    def begin(self, receives: PeerTensors, sends: PeerTensors, timeout_s: float) -> _Awaited:
        expected = []
        with self._rail.changed:
            for end, tensor in sends:
                self._rail.sent[self.host, end].append(tensor.clone())
            for end, tensor in receives:
                expected.append((end, self._counts[end], tensor))
                self._counts[end] += 1
            self._rail.changed.notify_all()
        return _Awaited(self._rail, self.host, expected)

    def close(self) -> None:
        with self._rail.changed:
            self._rail.left.add(self.host)
            self._rail.changed.notify_all()
        with _making:
            if len(self._rail.left) == self.size:
                _rails.pop(self._token, None)
