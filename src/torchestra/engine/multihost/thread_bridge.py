"""A bridge among threads of one process, which pretend to be on several hosts: for tests."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

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
    """What the ends share: meetings, letters by sender and receiver. ``left`` are those that are closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[Hashable, _Meeting] = {}
        self.letters: defaultdict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.left: set[int] = set()


_rails: dict[str, _Rail] = {}
_making = threading.Lock()


class _Awaited:
    """See Pending. ``ends`` are those that must come."""

    def __init__(self, rail: _Rail, meeting: _Meeting, ends: set[int]) -> None:
        self._rail = rail
        self._meeting = meeting
        self._ends = ends

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._rail.changed:
            while not self._meeting.done:
                if gone := self._ends & self._rail.left - self._meeting.calls.keys():
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
        self._numbers: Counter[Hashable] = Counter()
        with _making:
            self._rail = _rails.setdefault(self._token, _Rail(size))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Awaited:
        def run(calls: _Calls) -> None:
            for place, host in zip(output.chunk(self.size), range(self.size), strict=True):
                place.copy_(calls[host][0])

        return self._call("all_gather", run, tensor, ())

    def tell(self, output: torch.Tensor, tensor: torch.Tensor, seconds: float) -> _Awaited:
        def run(calls: _Calls) -> None:
            for place, host in zip(output.chunk(self.size), range(self.size), strict=True):
                given, _ = calls[host]
                place[: given.numel()].copy_(given)

        return self._call("tell", run, tensor, ())

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
                piece = given.split(list(lengths))[self.host]
                place[: piece.numel()].copy_(piece)

        return self._call("exchange", run, tensor, sent)

    def has_met(self, seconds: float) -> bool:
        return True

    def send(self, tensor: torch.Tensor, end: int, seconds: float) -> _Awaited:
        return self._call("message", lambda calls: None, tensor, (), (self.host, end))

    def receive(self, tensor: torch.Tensor, end: int, seconds: float) -> _Awaited:
        def run(calls: _Calls) -> None:
            tensor.copy_(calls[end][0])

        return self._call("message", run, tensor, (), (end, self.host))

    def write(self, letter: torch.Tensor, end: int) -> object:
        with self._rail.changed:
            if gone := self._rail.left & {self.host, end}:
                raise BridgeError(f"host {min(gone)} has closed its end")
            self._rail.letters[self.host, end].append(letter)
            self._rail.changed.notify_all()
        return None

    def letters(self, end: int, length: int, awaited: Callable[[], bool]) -> Iterator[torch.Tensor]:
        rail, box = self._rail, self._rail.letters[end, self.host]
        while True:
            with rail.changed:
                rail.changed.wait_for(lambda: self.host in rail.left or box or end in rail.left)
                if self.host in rail.left or not box:
                    raise BridgeError(f"host {min(rail.left)} has closed its end")
                letter = box.popleft()
            yield letter

    def hurry(self) -> None:
        pass  # letters come at once

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
        self,
        what: str,
        run: Callable[[_Calls], None],
        tensor: torch.Tensor,
        sent: Sequence[int],
        way: tuple[int, int] | None = None,
    ) -> _Awaited:
        """Take part in the next operation, of all ends or on the way from one to another."""
        rail, ends = self._rail, set(way or range(self.size))
        with rail.changed:
            key = (way, self._numbers[way])
            self._numbers[way] += 1
            meeting = rail.meetings.setdefault(key, _Meeting())
            meeting.calls[self.host] = (what, run, tensor, sent)
            if meeting.calls.keys() == ends:
                assert len({called for called, *_ in meeting.calls.values()}) == 1, "the ends differ"
                given = {host: (tensor, sent) for host, (_, _, tensor, sent) in meeting.calls.items()}
                for _, run, *_ in meeting.calls.values():
                    run(given)
                del rail.meetings[key]
                meeting.done = True
                rail.changed.notify_all()
        return _Awaited(rail, meeting, ends)
