"""Where ranks share cores, a caller can wait until the asynchronous operation that it began has been sent."""

from __future__ import annotations

import pytest
import torch
from simulated import SECONDS, on_threads

import torchestra as dist
from torchestra.engine.multihost import engine as multihost


@pytest.fixture(autouse=True)
def cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "spare_cores", lambda ranks: 0)


def await_sending(length: int) -> None:
    assert dist.group.WORLD is not None
    engine = dist.group.WORLD.communicator.engine
    assert engine.hosts is not None
    before = engine.operations_sent
    tensor = torch.ones(length)
    work = dist.all_reduce(tensor, async_op=True)
    engine.await_sending(before)
    assert engine.operations_sent > before
    assert work is not None
    work.wait()
    assert (tensor == dist.get_world_size()).all()


@pytest.mark.parametrize("length", [3, 300_000])
def test_it_waits_until_the_operation_has_been_sent(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(multihost, "_LONGEST_WAIT", SECONDS)
    on_threads((1, 2), await_sending, length)


def begin_nothing() -> None:
    assert dist.group.WORLD is not None
    engine = dist.group.WORLD.communicator.engine
    assert engine.hosts is not None
    engine.await_sending(engine.operations_sent)


def test_it_does_not_wait_for_ever() -> None:
    on_threads((1, 1), begin_nothing)
