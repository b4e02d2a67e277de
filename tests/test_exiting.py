"""No thread of a pool runs a function when the interpreter ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from torchestra.system import exiting
from torchestra.system.exiting import end_running_functions
from warm_programs import FinalizedWarm


class Pool:
    """Runs one function on a thread."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=function, daemon=True)
        self.thread.start()

    def running(self) -> Collection[threading.Thread]:
        return (self.thread,)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    pools: list[Pool] = []
    monkeypatch.setattr(exiting, "_pools", pools)
    return pools


def test_a_function_that_ends_soon_is_waited_for(pools: list[Pool]) -> None:
    goes_on, over = threading.Event(), []

    def function() -> None:
        goes_on.wait()
        over.append(True)

    pools.append(Pool(function))
    threading.Timer(0.01, goes_on.set).start()
    end_running_functions(patience_s=60.0)
    assert over == [True]


def test_a_function_that_goes_on_is_left(pools: list[Pool]) -> None:
    left: list[BaseException] = []

    def function() -> None:
        try:
            while True:
                pass
        except SystemExit as error:
            left.append(error)

    pools.append(Pool(function))
    end_running_functions(patience_s=0.0, timeout_s=60.0)
    assert not pools[0].thread.is_alive()
    assert len(left) == 1


def test_one_that_is_inside_of_a_long_call_is_not_waited_for(pools: list[Pool]) -> None:
    lock = threading.Lock()

    def function() -> None:
        with contextlib.suppress(SystemExit):
            lock.acquire()

    with lock:
        pools.append(Pool(function))
        end_running_functions(patience_s=0.0, timeout_s=0.01)
        assert pools[0].thread.is_alive()
    pools[0].thread.join()


CALLBACK = """
import sys, threading, torch
import torchestra as dist

begun = threading.Event()

def compute(_):
    begun.set()
    value = torch.ones(30_000)
    while True:
        value = value * 1.0001 + 1.0

dist.init_process_group(init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
if sys.argv[1] == "0":  # rank 1 begins when the callback is there, which therefore runs on the group's thread
    dist.all_reduce(torch.ones(10), async_op=True).get_future().then(compute)
    open(sys.argv[2] + "-pipe", "w").close()
    begun.wait()
else:
    open(sys.argv[2] + "-pipe").close()
    dist.all_reduce(torch.ones(10))
"""
PROGRAM = """
import os, sys, threading, torch
from torchestra import rpc

begun = threading.Event()

def compute(value):
    begun.set()
    while True:
        value = value * 1.0001 + 1.0  # which asks for the interpreter's lock at each end

rank = int(sys.argv[1])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(
    init_method=f"file://{sys.argv[2]}"))
rpc.rpc_async(f"worker{1 - rank}", compute, args=(torch.ones(30_000),))
begun.wait()
"""


@pytest.mark.parametrize("text", [PROGRAM, CALLBACK], ids=["remote function", "callback of a future"])
def test_processes_that_end_amid_functions_of_torch_end_well(text: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(text)
    for attempt in range(3):
        os.mkfifo(tmp_path / f"store{attempt}-pipe")
        command = [sys.executable, str(tmp_path / "program.py")]
        pipes = {"stderr": subprocess.PIPE, "text": True}
        workers = [
            FinalizedWarm([*command, str(rank), str(tmp_path / f"store{attempt}")], **pipes)
            for rank in range(2)
        ]
        told = [(worker.communicate()[1], worker.returncode) for worker in workers]
        assert [code for _, code in told] == [0, 0], told
        assert not [text for text, _ in told if "Fatal" in text or "terminate" in text]
