"""Limits of the system, and numbers that make no sense, are told at once and by their names."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

import torchestra as dist
from torchestra.errors import DistBackendError, DistNetworkError, InvalidArgumentError
from torchestra.rendezvous import rendezvous
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.pool import retried
from torchestra.system.limits import start_thread


def test_a_thread_that_cannot_be_started_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(DistBackendError, match=r"thread 'worker' cannot be started .*ulimit -u: "):
        start_thread(threading.Thread(name="worker"))
    with pytest.raises(DistBackendError, match=r"cannot be started .*ulimit -u: "):
        group.barrier()
    group.destroy()


UNSHARED = """
import ctypes, os, threading
from torchestra.errors import DistBackendError
from torchestra.system.limits import start_thread

if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID
    print("may not")
    raise SystemExit

def attempt():
    try:
        start_thread(threading.Thread(target=int))
    except DistBackendError as error:
        print(error)

attempt()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
attempt()
"""


def test_a_thread_that_an_unshared_namespace_forbids_is_not_said_to_be_one_too_many() -> None:
    told = subprocess.check_output([sys.executable, "-c", UNSHARED], text=True, timeout=100)
    if told == "may not\n":
        pytest.skip("no PID namespace may be made")
    assert told.count("has unshared the PID namespace") == 2, told
    assert "ulimit" not in told


NO_MEMORY = """
import os, resource, signal, threading
from torchestra.errors import DistBackendError
from torchestra.system.limits import start_thread

def attempt(slack):
    with open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * resource.getpagesize()
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20) + slack, resource.RLIM_INFINITY))
    try:
        start_thread(threading.Thread(target=int))
    except DistBackendError as error:
        os._exit(2 if "it ended in its first steps" in str(error) else 1)
    os._exit(0)

threading.stack_size(8 << 20)
ends = []
for slack in range(0, 40 << 10, 8 << 10):  # beyond the thread's stack
    pid = os.fork()
    if pid == 0:
        attempt(slack)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(ends)
"""


def test_a_thread_without_memory_for_its_first_steps_is_not_waited_for() -> None:
    program = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=300, check=False
    )
    ends = json.loads(program.stdout)
    assert set(ends) <= {0, 1, 2}, program.stderr
    assert 2 in ends, ends


def test_a_loopback_interface_that_is_down_is_said_so() -> None:
    def connect(_: float) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    with pytest.raises(DistNetworkError, match=r"127\.0\.0\.1:29500 .* the loopback interface .* is down"):
        retried(Address("127.0.0.1", 29500), connect, 3600.0)
    with pytest.raises(DistNetworkError, match="is the master"):
        retried(Address("192.0.2.1", 29500), connect, 0.01)


def test_a_world_of_millions_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match="is 5000000, but a world has at most 65536 ranks"):
        rendezvous("tcp://127.0.0.1:1", rank=0, world_size=5_000_000, timeout=timedelta(seconds=1))


def nothing() -> None:
    pass


def test_more_ranks_than_files_may_be_open_are_not_begun() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 100, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(100):
            os.close(taken.pop())
        with pytest.raises(DistBackendError, match=r"40 ranks cannot be started: .*ulimit -n: "):
            dist.launch(nothing, nproc=40)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


MORE_FILES = """
import os, resource
from torchestra.system.limits import allow_descriptors

most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
allow_descriptors(300)
now = resource.getrlimit(resource.RLIMIT_NOFILE)
allow_descriptors(200)  # there is room for them
assert resource.getrlimit(resource.RLIMIT_NOFILE) == now, now
for _ in range(300):
    os.open(os.devnull, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 600))
allow_descriptors(10_000)  # as far as it may
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, 600)
"""


def test_a_process_allows_itself_the_files_that_many_hosts_need() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MORE_FILES], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
