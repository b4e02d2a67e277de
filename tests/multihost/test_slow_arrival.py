"""Test that what a rank sent before it left arrives, and why its connection failed is told, however late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import on_threads

import torchestra as dist
from torchestra.engine import operations
from torchestra.engine.hosts import Hosts
from torchestra.engine.multihost import hierarchy, p2p_request
from torchestra.engine.multihost.bridge import BridgeError
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.heartbeat_bound import HEARTBEAT_VARIABLE
from torchestra.engine.multihost.hierarchy import Hierarchy
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.engine.operations import Kind
from torchestra.errors import GroupAbortedError
from torchestra.system import deadline

POLLS = 5
LENGTH = 100_000


class LatePending:
    """A message that has arrived, but is seen only some polls after its sender has left."""

    def __init__(self, pending: Any, detector: FailureDetector) -> None:
        self._pending, self._detector = pending, detector
        self._polls = 0

    def wait(self, seconds: float) -> bool:
        if self._polls < POLLS:
            self._polls += bool(self._detector.left)
            time.sleep(0.001)
            return False
        return bool(self._pending.wait(seconds))

    def awaited(self) -> Sequence[int]:
        return ()


def receive_from_one_that_leaves() -> None:
    group = dist.new_group()
    tensor = torch.full((LENGTH,), float(dist.get_rank()))
    dist.broadcast(tensor, 0, group=group)
    assert not tensor.any()
    dist.destroy_process_group(group)


def test_a_broadcast_arrives_though_its_root_has_left_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, "4")
    wait, late = Hierarchy.wait, []

    def wait_late(self: Hierarchy, pending: Any, call: Any) -> None:
        if pending in late:
            late.remove(pending)
            assert isinstance(self.detector, FailureDetector)
            pending = LatePending(pending, self.detector)
        wait(self, pending, call)

    broadcast = ThreadBridge.broadcast

    def broadcast_late(self: ThreadBridge, tensor: torch.Tensor, root: int, seconds: float) -> Any:
        pending = broadcast(self, tensor, root, seconds)
        if self.host != root:
            late.append(pending)
        return pending

    monkeypatch.setattr(Hierarchy, "wait", wait_late)
    monkeypatch.setattr(ThreadBridge, "broadcast", broadcast_late)
    on_threads((1, 1), receive_from_one_that_leaves)


def test_a_message_does_not_time_out_because_this_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting = p2p_request.P2PRequest("recv", 1, torch.empty(1), 0, 0, 10.0, None)
    now[0] += 100.0
    assert waiting.deadline.remaining() > 5
    for _ in range(10):
        now[0] += 1.0
        left = waiting.deadline.remaining()
    assert left == 0


def test_the_reason_for_a_failed_way_is_waited_for_until_whoever_finds_it_must_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of the store is reported after a number of sleeps, each of which lasts longer under load."""
    now, bound = [100.0], 2.0

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    class ToldLate:
        def check(self, *_: Any) -> None:
            if now[0] > 100 + 1.3 * bound:
                raise GroupAbortedError("the store is gone")

        def abort(self, why: str) -> None:
            raise AssertionError(why)

    made = Hierarchy.__new__(Hierarchy)
    made.context = ToldLate()  # type: ignore[assignment]
    made.detector = SimpleNamespace(bound=bound, dead=set(), left=set())  # type: ignore[assignment]
    made.hosts = Hosts([[0], [1]], ["a", "b"])
    made.rank = made.local_rank = 0
    call = hierarchy.Call(operations.pack(Kind.barrier), 0, 60.0, None)
    with pytest.raises(GroupAbortedError, match="the store is gone"):
        made._explain(BridgeError("reset"), call)
