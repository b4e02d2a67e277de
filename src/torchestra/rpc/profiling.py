"""Calls as ranges of torch's profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from torchestra.rpc.calls import name_of

if TYPE_CHECKING:
    from torchestra.rpc.agent import Agent

profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled


def recorded(
    mode: str, function: object, agent: Agent, to: int, call: Callable[[], Future[Any]]
) -> Future[Any]:
    """Make a call, as a range of the active profiler from now until the answer is there.

    Args:
        mode: "sync", "async" or "remote".
        agent, to: the worker that calls, and the rank of the one called.
    """
    names = f"{agent.info.name} -> {agent.workers[to].name}"
    with torch.autograd.profiler.record_function(f"rpc_{mode}#{name_of(function)}({names})") as record:
        future: Future[Any] = record._call_end_callbacks_on_future(call())
    return future
