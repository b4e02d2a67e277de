"""A rank that waits for a short message of another host receives it itself; an interrupt loses none."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from simulated import on_threads

import torchestra as dist
from interrupts import interrupted_at
from torchestra.engine.multihost import p2p_request, point_to_point
from torchestra.system import try_lock
from torchestra.transport import event_loop, framing, inbox, pair
from torchestra.transport.event_loop import EventLoop

FILES = [
    str(module.__file__)
    for module in (event_loop, framing, inbox, p2p_request, pair, point_to_point, try_lock)
]


PLACES = 400
"""More than there are points in a receive at which it can be interrupted."""


def ask_while_interrupted(waiting: threading.Event) -> set[str]:
    """Rank 1 is interrupted at every point of a receive, and receives again what had not arrived by then."""
    interrupted: set[str] = set()
    if dist.get_rank() == 0:
        question = torch.zeros(1, dtype=torch.int64)
        while True:
            dist.recv(question, 1)
            if question.item() < 0:
                return interrupted
            assert waiting.wait(30.0)
            dist.send(question, 1, tag=int(question.item()))
    for number in range(2 * PLACES):
        place = number % PLACES
        waiting.clear()
        dist.send(torch.tensor([number]), 0)
        answer = torch.tensor([-1])
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, FILES) as where:
            dist.recv(answer, 0, tag=number)
        if answer.item() != number:
            assert where
            dist.recv(answer, 0, tag=number)
        assert answer.item() == number
        interrupted.update(each.partition(":")[0] for each in where)
    dist.send(torch.tensor([-1]), 0)
    return interrupted


def test_an_interrupt_anywhere_in_a_receive_loses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is sent when rank 1 begins to receive, so it arrives during the receive."""
    waiting = threading.Event()
    receive_for = EventLoop.receive_for

    def noted(loop, take, timeout_s):
        if dist.get_rank() == 1:
            waiting.set()
        return receive_for(loop, take, timeout_s)

    monkeypatch.setattr(EventLoop, "receive_for", noted)
    _, interrupted = on_threads((1, 1), ask_while_interrupted, waiting)
    assert {"receive_for", "_take", "_take_short", "_match"} <= interrupted


def test_who_waits_for_a_short_message_leaves_others_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    receive_for = EventLoop.receive_for

    def counted(loop, take, timeout_s):
        def noted(*message):
            accepted = take(*message)
            ended.append(accepted)
            return accepted

        return receive_for(loop, noted, timeout_s)

    monkeypatch.setattr(EventLoop, "receive_for", counted)
    on_threads((1, 1), exchange_with_others_among_them)
    assert True in ended
    assert False in ended


def exchange_with_others_among_them() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    received, other = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    for number in range(100):
        later = dist.irecv(other, peer, tag=1)
        for turn in (0, 1):
            if turn != rank:
                dist.recv(received, peer)
                assert received.item() == number
                continue
            if number % 2:
                dist.send(torch.full_like(other, number), peer, tag=1)
            dist.send(torch.tensor([number]), peer)
        if number % 2 == 0:
            dist.send(torch.full_like(other, number), peer, tag=1)
        later.wait()
        assert other.item() == number
