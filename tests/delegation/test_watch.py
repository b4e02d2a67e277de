"""For how long an operation on a device may take."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torchestra.engine.device import completion
from torchestra.engine.device.completion import CompletionThread, PendingOperation
from torchestra.errors import CollectiveTimeoutError, GroupAbortedError
from torchestra.system import deadline

SOON = 20.0


class Alone:
    """A rank of a group in which nobody dies."""

    group_rank, size = 0, 1

    def check(self, *_: Any, **__: Any) -> None:
        return None

    def report(self, *_: Any) -> str:
        return ""

    def ask_elsewhere(self) -> list[Any]:
        return []

    def abort(self, why: str, explain: object) -> None:
        self.why = why

    def aborted(self) -> GroupAbortedError:
        return GroupAbortedError(self.why)


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in (completion, deadline):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watching = CompletionThread(Alone(), "world", lambda: None)  # type: ignore[arg-type]
    pending = PendingOperation("all_reduce", lambda: False, deadline.Deadline(10.0), "here")
    now[0] += 100.0
    watching._check(pending)
    for _ in range(150):
        now[0] += 0.05
        watching._check(pending)
    for _ in range(50):
        now[0] += 0.05
        pending.deadline.elapsed()
    with pytest.raises(CollectiveTimeoutError, match=r"timed out after 10\.\d s"):
        watching._check(pending)


def test_what_is_looked_at_and_has_not_ended_is_not_drained() -> None:
    """It is the only thing under way, so that nothing else keeps barrier, order_after and close waiting."""
    watching = CompletionThread(Alone(), "world", lambda: None)  # type: ignore[arg-type]
    drained: list[bool] = []
    ended = threading.Event()

    def is_done() -> bool:
        drained.append(watching.drain(0.0))
        return len(drained) == 10

    watching.add(PendingOperation("all_reduce", is_done, deadline.Deadline(10.0), "here"))
    assert watching.drain(SOON)
    assert drained == [False] * 10
    drained.clear()
    watching.tell(is_done, lambda _: ended.set())
    assert ended.wait(SOON)
    assert drained == [False] * 10
    watching.close()
