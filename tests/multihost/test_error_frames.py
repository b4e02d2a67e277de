"""What an error keeps alive: nothing, once the program has dropped it, even if no garbage is collected."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import on_threads

import torchestra as dist
from torchestra.engine.multihost.bridge import BridgeError
from torchestra.engine.multihost.gloo_bridge import _Transfer
from torchestra.engine.multihost.gloo_works import WorksWaiter
from torchestra.errors import DistBackendError
from torchestra.system.deadline import Deadline
from worlds import OP_SECONDS, run

SECONDS = 5.0


def fail(*arguments: Any) -> Any:
    raise BridgeError("the link was cut")


def call_in_vain(cause: str, ended: threading.Event) -> bool:
    """Rank 0 calls an operation that fails; whether its tensor is still there afterwards."""
    dist.barrier()
    group: Any = dist.group.WORLD
    engine = group.communicator.engine
    if dist.get_rank() == 1:
        if cause == "abort":
            engine.abort("rank 1 gives up")
        assert ended.wait(OP_SECONDS)
        return False
    if cause == "bridge":
        engine.hierarchy.detector.bound = 0.01
        engine.hierarchy.bridge.tell = lambda *arguments: SimpleNamespace(wait=fail)
    tensor = torch.ones(1000)
    kept = weakref.ref(tensor)
    failed = False
    gc.disable()
    try:
        group.communicator.all_reduce(tensor, dist.ReduceOp.SUM, False, 0.1)
    except DistBackendError:
        failed = True
    finally:
        del tensor
        # For a moment, another thread may look where this one is.
        found = all(kept() is not None for _ in Deadline(SECONDS).polls(0.01))
        gc.enable()
        ended.set()
    assert failed
    return found


@pytest.mark.parametrize("cause", ["time-out", "abort", "bridge"])
def test_an_error_over_hosts_keeps_no_tensor(cause: str) -> None:
    assert on_threads((1, 1), call_in_vain, cause, threading.Event()) == [False, False]


def test_an_error_within_a_host_keeps_no_tensor() -> None:
    assert run("threads", 2, call_in_vain, "time-out", threading.Event()) == [False, False]


def begin_in_vain() -> tuple[_Transfer, weakref.ref[torch.Tensor]]:
    """Begin a transfer, which Gloo refuses; return it, and a tensor of this frame."""
    tensor = torch.ones(1000)

    def begin() -> list[Any]:
        raise RuntimeError("Gloo refuses this")

    transfer = _Transfer(begin, timedelta(seconds=SECONDS))
    transfer.begin()
    transfer.run(WorksWaiter())
    return transfer, weakref.ref(tensor)


def test_a_transfer_over_gloo_that_does_not_begin_keeps_no_tensor() -> None:
    """Frames refer to outputs of modules; and these, by hooks in C++, to the group and so to the transfer."""
    gc.disable()
    try:
        transfer, kept = begin_in_vain()
        assert kept() is None
        with pytest.raises(BridgeError, match="Gloo refuses this"):
            transfer.wait(SECONDS)
    finally:
        gc.enable()
