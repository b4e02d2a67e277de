"""The fork server: a process that has loaded torch and the kernels once, and forks ranks on request.

Why a process of its own, between the launcher and the ranks:

- A process may be forked safely only while it has a single thread and no OpenMP region has run. An
  arbitrary Python program gives no such promise; the server does nothing but import, fork and wait.
- If launcher or server is killed, the other one cleans up. If the launcher is gone, the server
  kills the ranks' process groups, with all that the ranks started. If the server is gone, the
  kernel kills each rank (``PR_SET_PDEATHSIG``), and the launcher kills the process groups.
- The job's store is served by processes of their own, forked before the ranks, so that it survives the death
  of any rank. If there are several, each serves a replica; one that is killed is started again, and takes the
  state from the others. As the server has the listening sockets open, the address stays, and who connects
  meanwhile waits.
- The server waits for its ranks with ``epoll`` on their pidfds, which reports them in the order in
  which they died. That order tells the first failure from its consequences.

A server runs one job at a time; it exits when its launcher closes the socket or dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol, cast

from torchestra.arguments.annotations import prepare_checks
from torchestra.launcher import rank_process
from torchestra.launcher.channel import receive, send
from torchestra.launcher.event_loop import EventLoop
from torchestra.launcher.spec import Ended, Forked, JobSpec, Ready, Replace, SignalRanks, StoreServed

_PR_SET_PDEATHSIG = 1
_POLL_WITHOUT_PIDFD_S = 0.02


class _Prctl(Protocol):
    def __call__(self, option: int, argument: int, /) -> int: ...


def serve_descriptor(descriptor: int) -> NoReturn:
    """Call :func:`serve` in a fresh interpreter that has inherited the socket."""
    serve(socket.socket(fileno=descriptor), os.getppid(), spawned=True)


def serve(end: socket.socket, launcher: int, *, spawned: bool = False) -> NoReturn:
    """Run the fork server of the process ``launcher`` at the other end of the socket; never return.

    The caller has a single thread and nothing to clean up: ranks are forked from here and end here.

    Args:
        end: the server's end of a :func:`~torchestra.launcher.channel.channel`.
        launcher: the process id of the launcher, this process's parent.
        spawned: whether this is a fresh interpreter, whose parent may outlive the thread that started it.
    """
    try:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        # Blocked rather than ignored: a rank that is signalled before it has its own handlers keeps the
        # signal until it has them.
        signal.pthread_sigmask(signal.SIG_BLOCK, rank_process.SIGNALS)
        prctl = cast(_Prctl, ctypes.CDLL(None).prctl)
        if not spawned:
            _die_with_parent(prctl, launcher)
        _load()
        prctl(_PR_SET_PDEATHSIG, 0)
        server = _Server(end, launcher, prctl)
        send(end, Ready())
        server.run()
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _load() -> None:
    """Import what ranks need. The garbage collector would only cost time, now and for pages copied later."""
    gc.disable()
    import numpy as np

    import torchestra
    from torchestra.engine import warm_up

    for name in torchestra.__all__:
        getattr(torchestra, name)
    warm_up()
    np.random.seed()  # As each rank will: what it imports is then there.
    # What the libraries undo at exit (torch unregisters its operators one by one) ends with the
    # process anyhow; in each rank, undoing it would copy thousands of pages only to drop them.
    finalizers: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in finalizers:
        finalizer.atexit = False
    gc.freeze()
    gc.enable()


def _die_with_parent(prctl: _Prctl, parent: int) -> None:
    """Have the kernel kill this process when its parent dies; at once if it has died already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve_store(spec: JobSpec, listeners: list[int], index: int, recovering: bool) -> NoReturn:
    """Serve a job's store in a process of its own, until killed; if it has several listeners, one replica."""
    from torchestra.store import StoreReplica, TCPStoreServer

    secret, listener = spec.environment["TORCHESTRA_SECRET"], listeners[index]
    if len(listeners) == 1:
        server = TCPStoreServer(listen_fd=listener, secret=secret)
    else:
        addresses = spec.environment["TORCHESTRA_STORE"].split(",")
        server = StoreReplica(index, addresses, listen_fd=listener, secret=secret, recovering=recovering)
    with server:
        while True:
            signal.pause()


class _Server:
    """The server once it has loaded everything; it runs one job after another."""

    def __init__(self, end: socket.socket, launcher: int, prctl: _Prctl) -> None:
        self._end = end
        self._prctl = prctl
        self._ranks: dict[int, int] = {}  # rank by pid, of those alive
        self._pidfds: dict[int, int] = {}  # by pid
        self._listeners: list[int] = []  # of the job's store
        self._stores: dict[int, int] = {}  # which replica of the store, by pid
        self._spec: JobSpec | None = None
        self._clean_groups = True  # of the ranks that end now: the job fails or is being stopped
        self._serving = True
        self._loop = EventLoop()
        self._loop.watch(end, self._handle)
        self._watch(launcher, self._stop)

    def run(self) -> None:
        """Serve until the launcher is gone; then kill what still runs."""
        try:
            while self._serving:
                self._loop.run_once()
        finally:
            self._signal(SignalRanks(signal.SIGKILL))
            for pid in self._ranks:
                os.waitpid(pid, 0)
            self._end_store()

    def _stop(self) -> None:
        self._serving = False

    def _handle(self) -> None:
        """Carry out one message of the launcher; stop when the launcher is gone."""
        message = receive(self._end)
        if message is None:
            self._stop()
        elif isinstance(message.content, SignalRanks):
            self._signal(message.content)
        elif isinstance(message.content, Replace):
            self._replace(message.content, message.files)
        else:
            assert isinstance(message.content, JobSpec)
            self._start_job(message.content, message.files)

    def _start_job(self, spec: JobSpec, listeners: list[int]) -> None:
        files_of_ranks: list[list[int]] = []
        for _ in range(spec.nproc):
            message = receive(self._end)
            if message is None:
                raise ConnectionResetError("the launcher ended while it sent its job")
            files_of_ranks.append(message.files)
        for name in spec.preload:
            importlib.import_module(name)
        if spec.preload:
            prepare_checks()
        gc.freeze()
        received = [descriptor for files in files_of_ranks for descriptor in files]
        self._spec, self._listeners = spec, listeners
        for index in range(len(listeners)):
            self._start_store(index, received)
        self._tell_store()
        self._clean_groups = False
        pids = {
            rank: self._start_rank(spec, rank, files, received) for rank, files in enumerate(files_of_ranks)
        }
        for descriptor in received:
            os.close(descriptor)
        send(self._end, Forked(pids))

    def _start_store(self, index: int, received: list[int], *, recovering: bool = False) -> None:
        assert self._spec is not None
        serve = partial(_serve_store, self._spec, self._listeners, index, recovering)
        pid = self._fork(serve, received, [self._listeners[index]])
        self._stores[pid] = index
        if len(self._listeners) > 1:  # without replicas, what the store held is lost with its process
            self._await_end(pid, self._reap_store)

    def _reap_store(self, pid: int) -> None:
        """Start a replica of the store again if it was killed; one that has failed by itself would again."""
        if pid not in self._stores or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return
        status = os.waitpid(pid, 0)[1]
        self._unwatch(pid)
        index = self._stores.pop(pid)
        if os.WIFSIGNALED(status):
            self._start_store(index, [], recovering=True)
            self._tell_store(index)

    def _tell_store(self, restarted: int | None = None) -> None:
        send(self._end, StoreServed({index: pid for pid, index in self._stores.items()}, restarted))

    def _replace(self, order: Replace, files: list[int]) -> None:
        assert self._spec is not None
        environment = {**self._spec.environment, **order.variables}
        pid = self._start_rank(
            replace(self._spec, joins=True, environment=environment), order.rank, files, files
        )
        for descriptor in files:
            os.close(descriptor)
        send(self._end, Forked({order.rank: pid}))

    def _start_rank(self, spec: JobSpec, rank: int, files: list[int], received: list[int]) -> int:
        pid = self._fork(partial(rank_process.run, spec, rank, files), received, files)
        self._ranks[pid] = rank
        self._await_end(pid, self._reap)
        return pid

    def _fork(self, body: Callable[[], NoReturn], received: list[int], keep: list[int]) -> int:
        """Fork a process that dies with this one, leads its own group, and has open only ``keep`` of ours."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                _die_with_parent(self._prctl, server)
                self._end.close()
                self._loop.close()
                for descriptor in {*received, *self._listeners, *self._pidfds.values()}.difference(keep):
                    os.close(descriptor)
                body()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        # Parent and child both set it: whichever comes first, the group exists before it is signalled.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid

    def _watch(self, pid: int, when_ended: Callable[[], object]) -> bool:
        """Call a function when a process ends; return False if the kernel (before 5.3) has no pidfds."""
        try:
            self._pidfds[pid] = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return False
        self._loop.watch(self._pidfds[pid], when_ended)
        return True

    def _await_end(self, pid: int, reap: Callable[[int], None]) -> None:
        if not self._watch(pid, partial(reap, pid)):
            self._poll(pid, reap)

    def _poll(self, pid: int, reap: Callable[[int], None]) -> None:
        reap(pid)
        if pid in self._ranks or pid in self._stores:
            self._loop.call_at(time.monotonic() + _POLL_WITHOUT_PIDFD_S, partial(self._poll, pid, reap))

    def _unwatch(self, pid: int) -> None:
        if pid in self._pidfds:
            self._loop.unwatch(self._pidfds[pid])
            os.close(self._pidfds.pop(pid))

    def _reap(self, pid: int) -> None:
        """Tell the launcher how a rank ended, and kill what the rank left behind if the job is failing."""
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            return
        now = time.monotonic()
        exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        if exit_code != 0 or self._clean_groups:
            # Before the rank is reaped: until then no other process can get its pid.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._unwatch(pid)
        rank = self._ranks.pop(pid)
        if not self._ranks:
            self._end_store()
        send(self._end, Ended(rank, exit_code, now))

    def _end_store(self) -> None:
        for pid in self._stores:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._unwatch(pid)
        self._stores.clear()
        while self._listeners:
            os.close(self._listeners.pop())

    def _signal(self, order: SignalRanks) -> None:
        """Signal the ranks alive: their processes, or with SIGKILL their whole process groups."""
        self._clean_groups = self._clean_groups or order.final
        for pid, rank in self._ranks.items():
            if order.rank not in (None, rank):
                continue
            if order.signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
                os.killpg(pid, order.signum)
            else:
                os.kill(pid, order.signum)
