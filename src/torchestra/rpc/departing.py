"""How a worker leaves a group that workers join and leave, while the others go on."""

from __future__ import annotations

import contextlib
import time

from torch.futures import Future

from torchestra.errors import RpcError, RpcTimeoutError
from torchestra.rpc.agent import Agent
from torchestra.rpc.functions import async_execution
from torchestra.rpc.package_functions import takes_agent
from torchestra.system.deadline import Deadline

_PAUSE_SECONDS = 0.001


def depart(agent: Agent, timeout_s: float) -> list[str]:
    """Finish all calls of a worker and to it; return the references that were still in use.

    These are dropped. Then every member has struck the worker out, and has no call to it pending.

    Args:
        timeout_s: how long it may take; 0 for no limit.

    Raises:
        RpcTimeoutError: it took longer; names the workers whose calls are not over.
    """
    deadline = Deadline(timeout_s or float("inf"))
    _await_quiet(agent, deadline)
    left = agent.rrefs.delete_users()
    _await_quiet(agent, deadline)
    others = [number for number in agent.workers.current() if number != agent.number]
    asked = {number: agent.call(number, _finish_calls_to, (agent.number,), timeout=0) for number in others}
    while waiting := [number for number, future in asked.items() if not future.done()]:
        names = ", ".join(repr(agent.workers[number].name) for number in waiting)
        _check(agent, deadline, f"{names} had not finished the calls to it")
        time.sleep(_PAUSE_SECONDS)
    return left


def _await_quiet(agent: Agent, deadline: Deadline) -> None:
    while not agent.is_quiet:
        _check(agent, deadline, f"{len(agent.pending)} calls are pending")
        time.sleep(_PAUSE_SECONDS)


def _check(agent: Agent, deadline: Deadline, what: str) -> None:
    if agent.closed:
        raise RpcError(f"worker {agent.info.name!r} {agent.end_reason} before it could leave")
    if deadline.expired():
        raise RpcTimeoutError(
            f"the shutdown of worker {agent.info.name!r} timed out after {deadline.timeout_s:g} s: {what}"
        )


@async_execution
@takes_agent
def _finish_calls_to(agent: Agent, number: int) -> Future[None]:
    """Strike a worker out that leaves; the future is done when this one has no call to it pending.

    Two that leave at once ask each other: these questions do not count.
    """
    done: Future[None] = Future()

    def check() -> None:
        pending = agent.pending.copy().values()
        if all(call.peer != number or call.function is _finish_calls_to for call in pending):
            agent.checks.discard(check)
            with contextlib.suppress(RuntimeError):  # another thread has looked at the same moment
                done.set_result(None)

    agent.workers.mark_gone(number)
    agent.checks.add(check)
    check()
    return done
