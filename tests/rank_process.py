"""The process of a rank of a test: it serves one world after the other, as long as each leaves it as it was.

To fork a process that has torch and all test modules loaded, and to take it down, takes more time than most
tests do. What a test could leave to the next one is undone (environment, folder, handlers of signals, random
states, settings of torch) or ends the process (an error, threads, open files, shared memory, a limit, a
namespace, a filter of system calls, a function that was replaced, what the test modules keep). Tests that
change anything else have processes of their own: ``fresh=True`` in ``worlds.py``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

import torchestra as dist
from torchestra.store import FileStore

# How long a rank waits for the others unless a test says otherwise.
OP_SECONDS = 100.0

_TESTS = os.path.dirname(os.path.abspath(__file__))
_THREADS_S = 1.0  # for threads of groups that the rank has left, and what they have open
_WATCHED = frozenset({"torchestra", "os", "posix", "time", "socket", "threading", "signal", "subprocess"})
_MOST_WORLDS = 200  # after which a process ends all the same: what torch keeps adds up


class Request(NamedTuple):
    """What one rank of a world shall do.

    Attributes:
        path: where modules are looked for.
        call: the pickled function and its arguments.
        init: whether the function is called in a default group; without, it is given a store, rank and size.
    """

    rank: int
    size: int
    directory: str
    timeout: float
    init: bool
    path: list[str]
    call: bytes


class Result(NamedTuple):
    """How a rank ended: what ``worlds.Outcome`` is made of, pickled, and whether the process serves on."""

    payload: bytes
    stays: bool


def serve(connection: Connection) -> NoReturn:
    """Be one rank after another, until the other end is closed or a world has left something behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    torch.set_num_threads(1)
    before = _State()
    for world in range(1, _MOST_WORLDS + 1):
        try:
            request: Request = connection.recv()
        except EOFError:
            os._exit(0)
        value, error, text = _call(request)
        payload = _pickled(value, error, text)
        failed, value, error = error is not None, None, None  # what they refer to would be taken for a leak
        stays = not failed and world < _MOST_WORLDS and before.is_back()
        with contextlib.suppress(OSError):
            connection.send(Result(payload, stays))
        if not stays:
            os._exit(1 if failed else 0)
    raise AssertionError("unreachable: the last world is not followed by another one")


def _call(request: Request) -> tuple[Any, BaseException | None, str]:
    """Call the test's function as one rank of its world; return its result, exception and traceback."""
    os.environ["WORLD_DIRECTORY"] = request.directory
    sys.path[:] = request.path
    try:
        fn, args = pickle.loads(request.call)
        store = FileStore(os.path.join(request.directory, "store"), request.size)
        value = _called_as_rank(request, store, fn, args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as caught:
        return None, caught, traceback.format_exc()
    return value, None, ""


def _called_as_rank(request: Request, store: FileStore, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if not request.init:
        return fn(store, request.rank, request.size, *args)
    dist.init_process_group(store=store, rank=request.rank, world_size=request.size, timeout=OP_SECONDS)
    dist.group.WORLD.set_timeout(request.timeout)
    return fn(*args)


def _pickled(value: Any, error: BaseException | None, text: str) -> bytes:
    try:
        payload = pickle.dumps((value, error, text))
        pickle.loads(payload)
    except Exception as unpicklable:
        told = AssertionError(f"{unpicklable!r} while pickling {value!r}, {error!r}\n{text}")
        return pickle.dumps((None, told, text))
    return payload


class _State:
    """What of a process a test could change, as it is now."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._filters = list(warnings.filters)
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._switch_s = sys.getswitchinterval()
        self._threads = threading.active_count()
        self._open = _open_files()
        self._functions = _functions()
        self._variables = _variables()
        self._limits = _limits()

    def is_back(self) -> bool:
        """Undo what can be undone; return whether the process is then as it was."""
        gc.enable()
        gc.collect()
        self._restore()
        if _limits() != self._limits:
            return False
        if any(owner.get(name) is not value for owner, name, value in self._functions):
            return False
        if any(
            owner.get(name) is not value or _content(value) != content
            for owner, name, value, content in self._variables
        ):
            return False
        deadline = time.monotonic() + _THREADS_S
        while not self._nothing_is_left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _nothing_is_left(self) -> bool:
        return (
            not dist.is_initialized()
            and threading.active_count() == self._threads
            and _open_files() == self._open
            and not _shared_memory()
        )

    def _restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._filters
        python, numpy, torchs = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        sys.setswitchinterval(self._switch_s)
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def _limits() -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """Return what the system allows the process, where its children live, and what its calls must pass."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    # A process that has unshared its children's PID namespace can start no thread once that is gone.
    namespaces = [_link(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))]
    with open("/proc/self/status") as file:
        filters = [line for line in file if line.startswith(("NoNewPrivs", "Seccomp", "Cpus_allowed:"))]
    return limits, namespaces, filters


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # a namespace with no process yet
        return ""


def _functions() -> list[tuple[Mapping[str, Any], str, Any]]:
    """Return what tests may replace: the functions and constants of torchestra and of some other modules.

    Each as the namespace of its module or class, its name there, and what it is.
    """
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _WATCHED or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) or attribute.isupper():
                found.append((vars(module), attribute, value))
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value)
                found += [(members, each, member) for each, member in members.items() if callable(member)]
    return found


def _variables() -> list[tuple[Mapping[str, Any], str, Any, object]]:
    """Return what the test modules keep: each one's namespace, a name there, what it is and what is in it."""
    return [
        (vars(module), name, value, _content(value))
        for module in list(sys.modules.values())
        if (getattr(module, "__file__", None) or "").startswith(_TESTS)
        for name, value in list(vars(module).items())
        if not name.startswith("__")
    ]


def _content(value: object) -> object:
    if isinstance(value, threading.Event):
        return value.is_set()
    return len(value) if isinstance(value, (list, dict, set, deque)) else None


def _open_files() -> list[str]:
    """What the process has open, but for the file of its stacks, which it keeps between its groups."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself, which was open only while it was listed
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(each for each in found if "memfd:stacks of torchestra" not in each)


def _shared_memory() -> bool:
    with open("/proc/self/maps") as file:
        return any("memfd:torchestra" in line for line in file)
