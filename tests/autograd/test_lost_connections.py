"""Test contexts whose maker is gone for one of the workers, and lives for the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossings import leaf

import rpc_workers
import worlds
from torchestra import autograd, rpc
from torchestra.autograd.contexts import ContextContainer, contexts_of
from torchestra.errors import WorkerFailedError
from torchestra.rpc.agent import Agent
from torchestra.rpc.current import current_agent

HOW = "died (its connection has ended)"
WEIGHT = torch.full((2,), 3.0, requires_grad=True)


class Trio:
    """Three workers on hosts of their own; 0 calls 2, which calls 1, which calls 2.

    Attributes:
        agents: by rank.
        noted: is set when worker 2 has taken a note of worker 1 after :meth:`part`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agents: dict[int, Agent] = {}
        self.meeting = threading.Barrier(3)
        self.noted = threading.Event()
        self._is_parted = False
        receive = ContextContainer.receive

        def note(contexts: ContextContainer, source: int, what: Any) -> None:
            receive(contexts, source, what)
            if self._is_parted and (contexts.rank, source) == (2, 1):
                self.noted.set()

        monkeypatch.setattr(ContextContainer, "receive", note)

    def part(self) -> None:
        """Have workers 0 and 1 lose each other."""
        self._is_parted = True
        for rank in (0, 1):
            network = self.agents[rank].router.network
            assert network is not None
            network.forget(1 - rank, HOW)
        for rank in (0, 1):
            self.await_that(lambda rank=rank: 1 - rank in self.agents[rank].liveness.gone)

    def await_that(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + worlds.OP_SECONDS
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def run(self, program: Callable[[Trio], None]) -> None:
        """Run a program on worker 0; no worker may have a context left."""
        worlds.run("threads", 3, self._work, program, hosts=["here", "there", "elsewhere"])

    def _work(self, program: Callable[[Trio], None]) -> None:
        rank = rpc_workers.begin(secret=rpc_workers.SECRET)
        self.agents[rank] = current_agent()
        try:
            self.meeting.wait(worlds.OP_SECONDS)
            if rank == 0:
                program(self)
            self.meeting.wait(worlds.OP_SECONDS)
            contexts = contexts_of(self.agents[rank])
            self.await_that(lambda: not any(contexts.counts().values()))
            self.meeting.wait(worlds.OP_SECONDS)
        except BaseException:
            self.meeting.abort()
            raise
        finally:
            rpc.shutdown(graceful=False)


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Trio:
    """Return three workers that have not begun."""
    return Trio(monkeypatch)


def weighted(value: torch.Tensor) -> torch.Tensor:
    return value * WEIGHT


def by_way_of_2(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(2, weighted, (value,)) * WEIGHT


def by_way_of_1_and_2(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(1, by_way_of_2, (value,)) * WEIGHT


def weight_gradient(context_id: int) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(WEIGHT)


def ask_of_1(context_id: int) -> torch.Tensor | None:
    return rpc.rpc_sync(1, weight_gradient, (context_id,))


def part_after_a_pass(trio: Trio) -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)  # whole numbers: sums are exact in any order
    expected = (2 * 9 * value).detach()  # of 27 times the value; the third factor is worker 1's
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(2, by_way_of_1_and_2, (value,)).sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        trio.part()
        assert trio.noted.wait(worlds.OP_SECONDS)
        with torch.no_grad():
            assert torch.equal(rpc.rpc_sync(2, weight_gradient, (context_id,)), expected)
            with pytest.raises(
                WorkerFailedError,
                match=rf"Could not find autograd context with id: {context_id} on worker 'worker1'"
                r" \(rank 1\): worker 'worker0' \(rank 0\), which made it, died",
            ):
                rpc.rpc_sync(2, ask_of_1, (context_id,))
        assert autograd.get_gradients(context_id)[value].tolist() == [27.0, 27.0]
        with pytest.raises(
            WorkerFailedError,
            match=rf"worker 'worker1' \(rank 1\) has ended its part of autograd context {context_id},"
            r" as for it worker 'worker0' \(rank 0\), which made it, died",
        ) as caught:
            autograd.backward(context_id, [loss])
        assert caught.value.worker == "worker1"


def test_a_worker_that_loses_the_maker_of_a_context_ends_it_for_none_that_has_not(trio: Trio) -> None:
    trio.run(part_after_a_pass)


def call_again(trio: Trio) -> None:
    """A call makes the context anew on worker 1, which is not to answer that it has no gradients in it."""
    value = torch.tensor([1.0, 2.0], requires_grad=True)  # whole numbers: sums are exact in any order
    expected = (2 * 9 * value).detach()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(2, by_way_of_1_and_2, (value,)).sum()
        autograd.backward(context_id, [loss])
        trio.part()
        assert trio.noted.wait(worlds.OP_SECONDS)
        assert rpc.rpc_sync(2, by_way_of_1_and_2, (torch.ones(2),)).tolist() == [27.0, 27.0]
        assert contexts_of(trio.agents[1]).find(context_id) is not None
        with (
            torch.no_grad(),
            pytest.raises(WorkerFailedError, match=r"on worker 'worker1'.*which made it, died"),
        ):
            rpc.rpc_sync(2, ask_of_1, (context_id,))
        with torch.no_grad():
            assert torch.equal(rpc.rpc_sync(2, weight_gradient, (context_id,)), expected)


def test_gradients_that_went_with_a_lost_maker_are_not_said_to_be_none(trio: Trio) -> None:
    trio.run(call_again)


class Parts(torch.autograd.Function):
    """In its backward on worker 1, workers 0 and 1 lose each other; it ends when worker 0 has given up."""

    trio: Trio
    given_up: threading.Event
    ended: threading.Event

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Parts.trio.part()
        assert Parts.given_up.wait(worlds.OP_SECONDS)
        Parts.ended.set()
        return gradient


def parting(value: torch.Tensor) -> torch.Tensor:
    return Parts.apply(value)


def to_part_on_1(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(1, parting, (value,)) * WEIGHT


def part_in_a_pass(trio: Trio) -> None:
    Parts.trio, Parts.given_up, Parts.ended = trio, threading.Event(), threading.Event()
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(2, to_part_on_1, (leaf(2),)).sum()
            with pytest.raises(WorkerFailedError, match=r"'worker1' .* has ended its part") as caught:
                autograd.backward(context_id, [loss])
            assert caught.value.worker == "worker1"
    finally:
        Parts.given_up.set()
    assert Parts.ended.wait(worlds.OP_SECONDS)


def test_a_pass_ends_where_a_worker_that_others_wait_for_loses_its_maker(trio: Trio) -> None:
    trio.run(part_in_a_pass)
