"""The workers of rpc_stress.py: calls of every kind at random, each checked."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

from torchestra import rpc
from torchestra.rendezvous import launch_environment

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SIZES = (0, 1, 100, 5_000, 70_000, 1_000_000)
HUGE, HUGE_EVERY = 16_000_000, 500
_SETTLE_SECONDS = 120.0

_performed = Counter[str]()
_counting = threading.Lock()


def _perform(what: str) -> None:
    with _counting:
        _performed[what] += 1


def echo(value: Any) -> Any:
    """Return what comes goes back."""
    _perform("echo")
    return value


def fail(text: str) -> None:
    """Raise what the caller expects."""
    _perform("fail")
    raise ValueError(text)


def along(path: list[int]) -> int:
    """Call on along a path of workers; its length."""
    _perform("along")
    return 1 + rpc.rpc_sync(path[0], along, (path[1:],), timeout=0) if path else 0


@rpc.functions.async_execution
def later(path: list[int]) -> torch.futures.Future[int]:
    """The same without keeping a thread."""
    _perform("later")
    done: torch.futures.Future[int] = torch.futures.Future()
    if path:
        return rpc.rpc_async(path[0], later, (path[1:],), timeout=0).then(lambda length: length.value() + 1)
    done.set_result(0)
    return done


class Box:
    """Serve as the value of references."""

    def __init__(self, value: torch.Tensor) -> None:
        _perform("box")
        self.value = value

    def get(self) -> torch.Tensor:
        _perform("get")
        return self.value


def unbox(box: rpc.RRef) -> torch.Tensor:
    """Return what is in a box, asked of its owner."""
    _perform("unbox")
    return box.rpc_sync(timeout=0).get()


def pass_on(box: rpc.RRef, path: list[int]) -> rpc.RRef:
    """A reference that has gone along a path of workers, and comes back."""
    _perform("pass_on")
    return rpc.rpc_sync(path[0], pass_on, (box, path[1:]), timeout=0) if path else box


class Caller:
    """One thread that calls."""

    def __init__(self, seed: str, workers: int, until: float) -> None:
        self.dice = random.Random(seed)
        self.workers = workers
        self.until = until
        self.made = Counter[str]()
        self.answered = 0
        self.bytes = 0
        self.error = ""

    def run(self) -> None:
        operations = (
            self.numbers,
            self.tensors,
            self.nested,
            self.not_waiting,
            self.in_flight,
            self.references,
            self.errors,
        )
        try:
            while time.monotonic() < self.until:
                self.dice.choice(operations)()
        except BaseException:
            self.error = traceback.format_exc()

    def somebody(self) -> int:
        return self.dice.randrange(self.workers)

    def path(self) -> list[int]:
        return [self.somebody() for _ in range(self.dice.randrange(8))]

    def tensor(self) -> torch.Tensor:
        size = HUGE if self.dice.randrange(HUGE_EVERY) == 0 else self.dice.choice(SIZES)
        value = torch.randint(0, 100, (size,), dtype=torch.uint8).to(self.dice.choice(DTYPES))
        self.bytes += 2 * value.nbytes
        return value

    def call(self, function: Any, *args: Any, times: int = 1) -> Any:
        """Call it on somebody; ``times``: of functions that this makes run."""
        self.made[function.__name__] += times
        value = rpc.rpc_sync(self.somebody(), function, args, timeout=0)
        self.answered += times
        return value

    def numbers(self) -> None:
        number = self.dice.randrange(1 << 40)
        assert self.call(echo, number) == number

    def tensors(self) -> None:
        value = self.tensor()
        found = self.call(echo, [value, value[: len(value) // 2]])
        assert torch.equal(found[0], value)
        assert torch.equal(found[1], value[: len(value) // 2])
        assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr() or not len(
            found[1]
        )

    def nested(self) -> None:
        path = self.path()
        assert self.call(along, path, times=1 + len(path)) == len(path)

    def not_waiting(self) -> None:
        path = self.path()
        assert self.call(later, path, times=1 + len(path)) == len(path)

    def in_flight(self) -> None:
        values = [self.dice.randrange(1000) for _ in range(self.dice.randrange(1, 300))]
        self.made["echo"] += len(values)
        futures = [rpc.rpc_async(self.somebody(), echo, (value,), timeout=0) for value in values]
        assert torch.futures.wait_all(futures) == values
        self.answered += len(values)

    def references(self) -> None:
        value, path = self.tensor(), self.path()
        self.made["box"] += 1
        box = rpc.remote(self.somebody(), Box, (value,), timeout=0)
        if self.dice.randrange(4):
            back = self.call(pass_on, box, path, times=1 + len(path))
            self.made["unbox"] += 1
            self.made["get"] += 1
            assert torch.equal(rpc.rpc_sync(self.somebody(), unbox, (back,), timeout=0), value)
            self.answered += 2
        self.answered += 1

    def errors(self) -> None:
        text = f"error {self.dice.random()}"
        self.made["fail"] += 1
        raised = ""
        try:
            rpc.rpc_sync(self.somebody(), fail, (text,), timeout=0)
        except ValueError as error:
            raised = str(error)
        assert text in raised
        self.answered += 1


def stress(seed: str, seconds: float, callers: int, hosts: int) -> dict[str, Any]:
    """On a worker: call for so long; what was made, answered and performed, and what is left."""
    warnings.simplefilter("error")
    logging.getLogger("torchestra.rpc").setLevel(logging.CRITICAL)  # it tells of functions that raise
    launch = launch_environment()
    assert launch.rank is not None
    assert launch.world_size is not None
    torch.set_num_threads(1)
    os.environ["TORCHESTRA_HOST_ID"] = f"host{launch.rank % hosts}"
    rpc.init_rpc(f"worker{launch.rank}")
    until = time.monotonic() + seconds
    crowd = [Caller(f"{seed}/{launch.rank}/{number}", launch.world_size, until) for number in range(callers)]
    threads = [threading.Thread(target=caller.run) for caller in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [caller.error for caller in crowd if caller.error]
    settled = _await_no_references()
    rpc.shutdown(graceful=not errors)
    return {
        "made": sum((caller.made for caller in crowd), Counter[str]()),
        "answered": sum(caller.answered for caller in crowd),
        "performed": _performed,
        "bytes": sum(caller.bytes for caller in crowd),
        "left": settled,
        "errors": errors,
    }


def _await_no_references() -> dict[str, str]:
    """Wait until nothing of this worker is referred to; what still is when that takes too long."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        gc.collect()
        left = {name: n for name, n in rpc.debug_info().items() if name.startswith("num_") and n != "0"}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
