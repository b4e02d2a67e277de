"""Interrupts wherever they may come in a call: no answer is lost, no message, and no thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

import pytest
import torch

import rpc_workers
from interrupts import interrupted_at
from torchestra import rpc
from torchestra.engine.p2p import endpoint
from torchestra.rpc import agent as agent_module
from torchestra.rpc import (
    api,
    calls,
    headers,
    leader_followers,
    messages,
    router,
    rref_context,
    shared_buffers,
    thread_state,
)
from torchestra.rpc.current import current_agent
from torchestra.rpc.leader_followers import LeaderFollowersPool
from torchestra.transport import pair, transport

PRODUCT = (
    agent_module,
    api,
    calls,
    endpoint,
    headers,
    leader_followers,
    messages,
    pair,
    router,
    rref_context,
    shared_buffers,
    thread_state,
    transport,
)
FILES = [module.__file__ for module in PRODUCT]
LONGEST = 30.0


def echo(value: Any) -> Any:
    return value


def values(what: str) -> Any:
    """Something that is sent as its name says, and comes back."""
    if what == "number":
        return 7
    if what == "text":  # longer than what is received at once
        return "x" * 700_000
    if what == "tensor":  # in a shared buffer within a host
        return torch.arange(1 << 17)
    return rpc.RRef("a value")


def has_ended(thread: threading.Thread) -> bool:
    """Return whether a thread has run; the pool counts one that is about to be started, too."""
    return thread.ident is not None and not thread.is_alive()


def await_none_pending() -> None:
    agent, deadline = current_agent(), time.monotonic() + LONGEST
    while agent.pending:
        assert time.monotonic() < deadline, [call.__dict__ for call in agent.pending.values()]
        time.sleep(0.001)


def interrupt_calls(what: str) -> int:
    """Interrupt calls at each point in turn; what has been asked for before is answered all the same."""
    value = values(what)
    for place in itertools.count():
        before = [rpc.rpc_async("worker1", echo, ((number, value),), timeout=LONGEST) for number in range(2)]
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, FILES) as where:
            rpc.rpc_sync("worker1", echo, (value,), timeout=LONGEST)
        for number, future in enumerate(before):
            assert future.wait()[0] == number, where
        await_none_pending()
        assert not any(map(has_ended, tuple(current_agent().pool._threads))), where
        if not where:
            return place
    raise AssertionError


# An interrupt in a finalizer that runs meanwhile is reported, and lost, by Python itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["threads", "hosts"], ids=["arena", "wire"])
@pytest.mark.parametrize("what", ["number", "text", "tensor", "reference"])
def test_an_interrupt_at_any_point_of_a_call_costs_nobody_an_answer(kind: str, what: str) -> None:
    assert rpc_workers.first(kind, 2, interrupt_calls, what) > 20


def break_a_thread() -> None:
    """A job that raises is a bug: it costs no thread of the pool."""
    pool, raised = current_agent().pool, threading.Event()

    def fail() -> None:
        raised.set()
        raise RuntimeError("a bug")

    pool.leave(fail)
    assert raised.wait(LONGEST)
    assert rpc.rpc_sync("worker1", echo, (3,), timeout=LONGEST) == 3
    assert pool.threads
    assert not any(map(has_ended, tuple(pool._threads)))
    deadline = time.monotonic() + LONGEST
    while pool._busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_error_in_a_thread_of_the_pool_ends_no_thread() -> None:
    rpc_workers.first("threads", 2, break_a_thread)


def test_an_interrupt_at_any_point_at_which_a_thread_is_added_leaves_none_that_was_not_started() -> None:
    for place in itertools.count():
        pool = LeaderFollowersPool("interrupted", None, lambda _: (0, None), lambda: None, 1, 2)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(place, FILES) as where:
            pool.start()
        pool.close()  # which joins them
        if not where:
            assert place > 3
            return
