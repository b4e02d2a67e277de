"""Bridges over sockets begin before their ends have met, and end what is under way when they are closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch

from torchestra.engine.hosts import Hosts
from torchestra.engine.multihost.bridge import Bridge, BridgeError, Pending
from torchestra.engine.multihost.bridge_selection import open_bridge
from torchestra.engine.multihost.gloo_bridge import GlooBridge
from torchestra.engine.multihost.gloo_works import abort
from torchestra.engine.multihost.group_transport import GroupTransport
from torchestra.store import HashStore

SECONDS = 30.0
KINDS = ["curve", "gloo"]


NAMES = ["host zero", "host one"]


def at_both_ends(kind: str, fn: Callable[[Bridge], None]) -> None:
    store, errors = HashStore(), []
    store.secret = "a secret of these tests"

    def body(end: int) -> None:
        transport = GroupTransport(store, Hosts([[0], [1]], NAMES), end)
        bridge = open_bridge(kind, store, transport, [0, 1], NAMES, SECONDS)
        try:
            fn(bridge)
        except BaseException as error:
            errors.append(error)
        finally:
            bridge.close()
            transport.close()

    threads = [threading.Thread(target=body, args=(end,), daemon=True) for end in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def numbers(length: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + length).to(torch.uint8)


def many_at_once(bridge: Bridge) -> None:
    """The first are begun before the other end can have been met; all arrive in their order."""
    here, there = bridge.host, 1 - bridge.host
    lengths = [1, 4096, 300_000, 0, 17]
    outputs = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    pending = []
    for output, length in zip(outputs, lengths, strict=True):
        counts = [0 if end == here else length for end in range(2)]
        pending.append(bridge.exchange(output, counts, numbers(length, here), counts, SECONDS))
    whole, root = torch.zeros(8, dtype=torch.uint8), numbers(5, 10 + here)
    pending.append(bridge.all_gather(whole, numbers(4, here), SECONDS))
    pending.append(bridge.broadcast(root, 1, SECONDS))
    roomy = torch.zeros(18, dtype=torch.uint8)
    pending.append(bridge.tell(roomy, numbers(3 + 5 * here, 1), SECONDS))
    assert all(each.wait(SECONDS) for each in pending)
    for output, length in zip(outputs, lengths, strict=True):
        assert torch.equal(output, numbers(length, there))
    assert torch.equal(whole, torch.cat([numbers(4, 0), numbers(4, 1)]))
    assert torch.equal(root, numbers(5, 11))
    assert roomy.tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 0, *range(1, 9), 0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_begun_before_the_ends_have_met_arrives_too(kind: str) -> None:
    at_both_ends(kind, many_at_once)


def wait_in_vain(bridge: Bridge, both_wait: threading.Barrier) -> None:
    awaited = torch.zeros(4, dtype=torch.uint8)
    assert bridge.all_gather(torch.zeros(2, dtype=torch.uint8), numbers(1, 0), SECONDS).wait(SECONDS)
    pending = bridge.broadcast(awaited, 1 - bridge.host, SECONDS)  # which nobody sends
    assert not pending.wait(0.01)
    both_wait.wait(SECONDS)  # or the other end would hear that this one has closed
    bridge.close()
    with pytest.raises(BridgeError, match=r"Gloo|closed|shut down|ended"):
        pending.wait(SECONDS)
    with pytest.raises(BridgeError, match="closed"):
        bridge.broadcast(awaited, bridge.host, SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_what_is_under_way(kind: str) -> None:
    at_both_ends(kind, partial(wait_in_vain, both_wait=threading.Barrier(2)))


def begin_long(bridge: Bridge, length: int) -> tuple[torch.Tensor, Pending]:
    """Begin to send from end 1 to end 0."""
    assert bridge.all_gather(torch.zeros(2, dtype=torch.uint8), numbers(1, 0), SECONDS).wait(SECONDS)
    tensor = torch.full((length,), bridge.host, dtype=torch.uint8)
    return tensor, bridge.broadcast(tensor, 1, SECONDS)


def close_amid(
    bridge: Bridge, length: int, first: int, turns: list[threading.Event], amid: list[bool]
) -> None:
    tensor, pending = begin_long(bridge, length)
    if bridge.host == 0:
        while not tensor[: 1 << 10].any():
            time.sleep(0)
        turns[first].set()
    assert turns[bridge.host].wait(SECONDS)
    bridge.close()
    turns[1 - bridge.host].set()
    has_ended = False
    with contextlib.suppress(BridgeError):
        has_ended = pending.wait(SECONDS / 2)  # Gloo's own time-out comes later
        assert has_ended, f"end {bridge.host} waits on after it has been closed"
    if bridge.host == 0:
        amid.append(not has_ended)


@pytest.mark.parametrize("first", [0, 1], ids=["receiver first", "sender first"])
def test_ends_closed_amid_a_long_message_leave_no_thread(first: int) -> None:
    """Gloo does not tell the send and the receive that are in the middle that their connection has failed."""
    amid: list[bool] = []
    for length in (1 << 26, 1 << 27, 1 << 28, 1 << 29):  # until one is closed before all has arrived
        turns = [threading.Event() for _ in range(2)]
        at_both_ends("gloo", partial(close_amid, length=length, first=first, turns=turns, amid=amid))
        if amid[-1]:
            break
    assert amid[-1]
    for thread in threading.enumerate():
        if thread.name.startswith("torchestra-gloo"):
            thread.join(SECONDS / 2)
            assert not thread.is_alive()


def test_this_build_of_torch_lets_works_of_gloo_be_ended() -> None:
    """Else closing a bridge warns, and leaves a thread until the time-out; that would be a new torch."""
    at_both_ends("gloo", both_can_be_aborted)


def both_can_be_aborted(bridge: Bridge) -> None:
    _, pending = begin_long(bridge, 1)
    assert pending.wait(SECONDS)
    assert isinstance(bridge, GlooBridge)
    group, peer = bridge._ends.group, 1 - bridge.host
    for work in (group.recv([torch.empty(1)], peer, 7), group.send([torch.empty(1)], peer, 8)):
        assert abort(work)
        assert not work.wait(timedelta(seconds=SECONDS))
    assert not abort(group.barrier())  # a work of another class: not touched
