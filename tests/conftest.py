"""Fixtures of every test. The time limit per test is in pyproject.toml, the one for all in run_limit.py."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import rpc_workers
import run_limit
from torchestra.engine import warm_up
from warm_programs import share_server

_TAG = "TORCHESTRA_TEST_TAG"
_END_SECONDS = 60.0
_WARM = "_ranks_start_warm"  # the fixture of folders whose tests run ranks
_THREADS = "rpc-", "transport of"  # how the names of threads begin that every test must end

# How long an example takes on a busy machine tells nothing. Each run has the same examples, in any worker and
# order; `--hypothesis-profile explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("explore"), derandomize=True)
settings.load_profile("tests")

# To find out which vectors the compiler knows, Inductor would compile ten programs in each worker: 17 s of
# processor time. It makes kernels without vectors instead.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A shell has what it runs in the background ignore Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Have the whole run be watched, and workers of xdist share what forks programs."""
    if not config.pluginmanager.is_registered(run_limit):
        config.pluginmanager.register(run_limit)
    if len(getattr(config.option, "tx", None) or []) > 1 and not config.option.collectonly:
        share_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: there is hardly any, and it takes a fifth of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Do once, and in no test's time, what would slow down many tests.

    Kernels that are not in the cache are compiled, which takes minutes on a busy machine. What collecting has
    loaded, torch and all test modules, stays to the end: ``gc.collect()``, which tests call often, need not
    look at it again, which takes 0.4 s, nor copy it in a forked rank.
    """
    kernels_wanted = any(_WARM in getattr(item, "fixturenames", ()) for item in session.items)
    if kernels_wanted and not session.config.option.collectonly:
        warm_up()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove all temporary files at the end, also those of ranks that are killed, and of torch itself."""
    tmp_path_factory.getbasetemp()  # outside: pytest keeps those of its last runs
    multiprocessing.util.get_temp_dir()  # outside: it is removed when the interpreter ends, which is later
    outside, named = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="torchestra-tests-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = outside
        if named is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = named


@pytest.fixture(scope="module", autouse=True)
def _nothing_for_later_modules() -> Iterator[None]:
    """Fail the module that leaves something, and not the one whose test finds it.

    That is threads of an RPC worker or of a transport between hosts, garbage that complains when it is
    collected (open files, say), and collection turned off, which it may be for a moment while a thread looks
    at frames.
    """
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + _END_SECONDS
    while left := rpc_workers.threads_since(before, _THREADS):
        assert time.monotonic() < deadline, f"a test of this module has left threads: {left}"
        time.sleep(0.01)
    while not gc.isenabled():
        assert time.monotonic() < deadline, "a test of this module has turned garbage collection off"
        time.sleep(0.001)
    gc.freeze()  # what is still there, as what the module has imported, is not looked at again and again


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it when what the test started should be gone: it waits a little, and fails naming what is not.

    Processes are known by a variable in the environment they inherited from this test, whoever their
    parent is by now; shared memory by what /dev/shm did not hold before, other programs' apart.
    """
    tag = uuid.uuid4().hex
    monkeypatch.setenv(_TAG, tag)
    shared_before = _shared_memory()

    def check() -> None:
        deadline = time.monotonic() + _END_SECONDS
        while (left := _processes(tag) + _left_in_memory(shared_before, tag)) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert left == [], f"left behind: {left}"

    return check


def _shared_memory() -> set[str]:
    """The shared memory that torchestra, torch or Python has named."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch", "psm_", "sem."))}


def _left_in_memory(before: set[str], tag: str) -> list[str]:
    """The shared memory that was not there before, but for what a process of another test has mapped."""
    if not (left := _shared_memory() - before):
        return []
    others: set[str] = set()  # inodes: a semaphore is mapped under another name than it has later
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{_TAG}={tag}".encode() not in (entry / "environ").read_bytes():
                    maps = (line.split() for line in (entry / "maps").read_text().splitlines())
                    others.update(
                        fields[4] for fields in maps if len(fields) > 5 and "/dev/shm/" in fields[5]
                    )
            except OSError:
                continue  # It ended meanwhile.
    found = []
    for name in sorted(left):
        with contextlib.suppress(FileNotFoundError):
            if str(os.stat(f"/dev/shm/{name}").st_ino) not in others:
                found.append(name)
    return found


def _processes(tag: str) -> list[str]:
    """The command lines of all processes, this one apart, that inherited the tag and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if f"{_TAG}={tag}".encode() in environment and not zombie:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # It ended meanwhile.
    return found
