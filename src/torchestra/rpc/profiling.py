"""Calls as ranges of torch's profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from torchestra.rpc.calls import name_of
from torchestra.rpc.worker_info import WorkerInfo

profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled


def recorded(
    mode: str, function: object, caller: WorkerInfo, called: WorkerInfo, call: Callable[[], Future[Any]]
) -> Future[Any]:
    """Make a call, as a range of the active profiler from now until the answer is there.

    Args:
        mode: "sync", "async" or "remote".
    """
    names = f"{caller.name} -> {called.name}"
    with torch.autograd.profiler.record_function(f"rpc_{mode}#{name_of(function)}({names})") as record:
        future: Future[Any] = record._call_end_callbacks_on_future(call())
    return future
