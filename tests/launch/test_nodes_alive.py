"""When one launcher of several takes another for gone."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torchestra.errors import DistNetworkError
from torchestra.launcher import nodes as meeting
from torchestra.launcher.nodes import NodeFailure, Nodes
from torchestra.store import HashStore
from torchestra.system import deadline


def launcher(node: int, store: Any) -> Nodes:
    """One of two, after they have met."""
    made = Nodes.__new__(Nodes)
    made.node, made.nnodes, made.other, made.exceeding_failure = node, 2, None, None
    made._name, made._least, made.members = str(node), None, 1
    made._store, made._closed = store, threading.Event()
    made._rendezvous = SimpleNamespace(server=None, host="here")  # type: ignore[assignment]
    made._store_address, made._replica = "here:1", None
    return made


def test_node_0_waits_for_the_others_though_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could say that it lives meanwhile: the store was stopped too."""
    now, store = [0.0], HashStore()
    store.set("heartbeat/1", "7")

    def be_stopped(seconds: float) -> None:
        now[0] += 100.0
        monkeypatch.setattr(meeting, "interruptible_sleep", see_it_end)

    def see_it_end(seconds: float) -> None:
        store.set("done/1", b"")

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(meeting, "interruptible_sleep", be_stopped)
    launcher(0, store)._await_the_others()
    assert store.check(["done/1"])


def test_node_0_does_not_wait_for_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = [0.0], HashStore()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(meeting, "interruptible_sleep", sleep)
    launcher(0, store)._await_the_others()
    assert 10 < now[0] < 11


class StoppedOnce(HashStore):
    """Gives no answer the first time, as if it and who asks had been stopped until the time was over."""

    unanswered = 1

    def clone(self) -> StoppedOnce:
        return self

    def wait(self, keys: Any, timeout: Any = None) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise DistNetworkError("gave no answer within 11 s") from TimeoutError()
        super().wait(keys, timeout)


def test_a_launcher_asks_again_before_it_takes_that_of_node_0_for_gone() -> None:
    store = StoppedOnce()
    store.set("failed", json.dumps([0, 3, "a rank failed"]))
    made = launcher(1, store)
    notified = []
    made.notify(lambda: notified.append(True))
    made._listen()
    assert notified == [True]
    assert made.other == NodeFailure(0, 3, "a rank failed")
