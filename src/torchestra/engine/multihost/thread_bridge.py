"""A bridge among threads of one process, which pretend to be on several hosts: for tests."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import torch

from torchestra.engine.multihost.bridge import BridgeError
from torchestra.store import Store

__all__ = ["ThreadBridge"]


class _Meeting:
    """One operation, for which the ends come one by one; the last to come runs it."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, Callable[[_Calls], None], torch.Tensor, Sequence[int]]] = {}
        self.done = False


_Calls = dict[int, tuple[torch.Tensor, Sequence[int]]]


class _Rail:
    """What the ends share. ``left`` are those that are closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}
        self.left: set[int] = set()


_rails: dict[str, _Rail] = {}
_making = threading.Lock()


class _Awaited:
    """See Pending."""

    def __init__(self, rail: _Rail, meeting: _Meeting) -> None:
        self._rail = rail
        self._meeting = meeting

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._rail.changed:
            while not self._meeting.done:
                if gone := self._rail.left - self._meeting.calls.keys():
                    raise BridgeError(f"host {min(gone)} has closed its end")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._rail.changed.wait(remaining)
        return True


class ThreadBridge:
    """See Bridge. The ends must be threads of one process, and ``store`` one that only they use."""

    kind = "threads"

    def __init__(self, store: Store, host: int, size: int) -> None:
        self.host = host
        self.size = size
        self._token = store.compare_set("rail", "", secrets.token_hex(16)).decode()
        self._number = 0
        with _making:
            self._rail = _rails.setdefault(self._token, _Rail(size))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Awaited:
        def run(calls: _Calls) -> None:
            for place, host in zip(output.chunk(self.size), range(self.size), strict=True):
                place.copy_(calls[host][0])

        return self._call("all_gather", run, tensor, ())

    def broadcast(self, tensor: torch.Tensor, root: int, seconds: float) -> _Awaited:
        def run(calls: _Calls) -> None:
            if self.host != root:
                tensor.copy_(calls[root][0])

        return self._call(f"broadcast from {root}", run, tensor, ())

    def exchange(
        self,
        output: torch.Tensor,
        expected: Sequence[int],
        tensor: torch.Tensor,
        sent: Sequence[int],
        seconds: float,
    ) -> _Awaited:
        def run(calls: _Calls) -> None:
            for host, place in enumerate(output.split(list(expected))):
                given, lengths = calls[host]
                place.copy_(given.split(list(lengths))[self.host])

        return self._call("exchange", run, tensor, sent)

    def close(self) -> None:
        with self._rail.changed:
            if self.host in self._rail.left:
                return
            self._rail.left.add(self.host)
            self._rail.changed.notify_all()
        with _making:
            if len(self._rail.left) == self.size:
                _rails.pop(self._token, None)

    def _call(
        self, what: str, run: Callable[[_Calls], None], tensor: torch.Tensor, sent: Sequence[int]
    ) -> _Awaited:
        rail = self._rail
        with rail.changed:
            meeting = rail.meetings.setdefault(self._number, _Meeting())
            self._number += 1
            meeting.calls[self.host] = (what, run, tensor, sent)
            if len(meeting.calls) == self.size:
                assert len({called for called, *_ in meeting.calls.values()}) == 1, "the ends differ"
                given = {host: (tensor, sent) for host, (_, _, tensor, sent) in meeting.calls.items()}
                for _, run, *_ in meeting.calls.values():
                    run(given)
                del rail.meetings[self._number - 1]
                meeting.done = True
                rail.changed.notify_all()
        return _Awaited(rail, meeting)
