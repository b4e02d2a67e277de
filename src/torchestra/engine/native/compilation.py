"""Compiling once: a lock between processes, a word to the user when it takes long, and nothing half-made."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numba
from numba.core import sigutils
from numba.core.ccallback import CFunc

from torchestra.engine.native.kernel_cache import cache_of, chosen_directory, open_own, say_once
from torchestra.system.cache_directories import prepare
from torchestra.system.limits import start_thread

Kernel = Callable[..., int]
T = TypeVar("T")

_ENGINE = Path(__file__).parents[1]
_QUIET_SECONDS = 2.0
_LOCK_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_KERNEL_SOURCES = ("layout.py", "kernels/*.py", "native/*.py", "p2p/*.py", "recorder/*.py")
# Several installations may share a cache directory: each has notes of its own.
_INSTALLATION = hashlib.sha256(f"{_ENGINE} {platform.python_version()}".encode()).hexdigest()[:16]


def _machine() -> str:
    """Differs where Numba compiles differently, though from the same sources: versions, processor."""
    digest = hashlib.sha256()
    for word in (
        numba.__version__,
        platform.machine(),
        platform.python_version(),
        numba.core.config.CPU_NAME,
    ):
        digest.update(repr(word).encode())
    return digest.hexdigest()[:16]


def _sources() -> str:
    """Return a digest that changes whenever a file does that kernels, or their constants, are written in."""
    digest = hashlib.sha256()
    for source in sorted(source for pattern in _KERNEL_SOURCES for source in _ENGINE.glob(pattern)):
        digest.update(f"{source}:{source.stat().st_mtime_ns}".encode())
    return digest.hexdigest()


def use_caches(functions: Iterable[Any]) -> None:
    """Have what is compiled of these kept, and found again, where there is a directory for it."""
    for function in functions:
        function._cache = cache_of(function.py_func)


def compiled_function(function: Callable[..., Any], signature: Any) -> Any:
    """Return a compiled function with the C calling convention, from the cache if it is there."""
    made: Any = CFunc(function, sigutils.normalize_signature(signature), {}, {"error_model": "numpy"})
    made._cache = cache_of(function)
    made.compile()
    return made


def forget_what_is_stale(functions: Iterable[Any]) -> None:
    """Empty Numba's cache of compiled functions that were made from other sources. With the lock held.

    Numba compiles a function anew when the file that it is written in has changed. But a kernel is made of
    functions and constants from several files, and would go on with their old versions.
    """
    sources = _sources()
    for folder in {Path(function.stats.cache_path) for function in functions if function.stats.cache_path}:
        # Beside what it tells of: who has another home directory finds the same functions there.
        note = folder / f"torchestra-sources-{_INSTALLATION}"
        if _read(note) == sources:
            continue
        with contextlib.suppress(OSError):
            for index in folder.glob("*.nbi"):
                if not index.name.startswith("reductions."):  # made from one file only
                    index.unlink(missing_ok=True)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(note, sources)


def _read(note: Path) -> str:
    """Return what a note says; nothing, if it is not there or not ours."""
    try:
        with os.fdopen(open_own(note, os.O_RDONLY), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write(note: Path, text: str = "") -> None:
    note.unlink(missing_ok=True)
    with os.fdopen(open_own(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Compile ``what``, or load it: without ado if a note says that it is in the cache, else with a lock.

    The first process to come compiles, the others then find the result in the cache. Without a lock nothing
    worse happens than that something is compiled twice: files of the cache are replaced as a whole. A line
    on stderr says that compilation is going on.
    """
    place = chosen_directory()
    folder = None if place is None else place.folder(Path(__file__))
    own = f"torchestra-compiled-{what}-{_INSTALLATION}"
    current = f"{own}-{_sources()[:16]}"
    note = None if folder is None else folder / f"{current}-{_machine()}"
    if folder is None or note is None or note.exists():
        yield
        return
    prepare(folder)  # it has no kernels, so perhaps nothing has made it
    with _locked(folder / f"torchestra-{_INSTALLATION}.lock"):
        fresh = not note.exists()
        if fresh and what == "kernels":
            print(
                "torchestra: compiling its kernels for this machine (once, some 10 seconds)",
                file=sys.stderr,
                flush=True,
            )
        yield
        if fresh:
            with contextlib.suppress(OSError):
                for old in folder.glob(f"{own}-*"):
                    # Hosts with other processors may share the directory.
                    if not old.name.startswith(current):
                        old.unlink(missing_ok=True)
                _write(note)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; without it, after a while, or where there are no such locks."""
    try:
        lock = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        if _lock(lock, path):
            with contextlib.suppress(OSError):  # a full disk
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            # Not only closed: a child that was forked meanwhile has the descriptor too.
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _lock(lock: int, path: Path) -> bool:
    """Wait for a lock as long as it is worth it; whether this process has it."""
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:  # a file system without locks
            return False
        if waited > _LOCK_SECONDS:
            say_once(f"process {_holder(lock)} still has {path}; compiling beside it")
            return False
        if waited > _QUIET_SECONDS and not told:
            told = True
            say_once(f"waiting for process {_holder(lock)}, which compiles the kernels and has {path}")
        time.sleep(_LOOK_SECONDS)


def _holder(lock: int) -> str:
    return os.pread(lock, 200, 0).decode("ascii", "replace") or "unknown"


def undisturbed(work: Callable[[], T]) -> T:
    """Return or raise what ``work`` does, whatever signals come meanwhile. Only the caller's wait ends by
    them.

    Numba keeps what a first compilation left half-made when a signal's handler raised in its midst (Ctrl-C, a
    test's time limit), and every later compilation in the process fails by it. Handlers run in the main
    thread, so the work is done in another, and goes to its end when nobody waits any more.
    """
    outcome: Future[T] = Future()

    def do() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again by the caller
            outcome.set_exception(error)

    thread = Thread(target=do, name="torchestra-compile", daemon=True)
    start_thread(thread)
    thread.join()  # not only the outcome: who forks next wants no thread beside it
    return outcome.result()


def entry_point(kernel: Any) -> Kernel:
    """Return the compiled function of a loaded kernel.

    Calling it spares the dispatcher's look at the types of the arguments, 0.1 to 0.3 µs; every
    argument must be an int.
    """
    # Where another kernel calls this one with a constant, there is a version made for that constant, too.
    general = (result for types, result in kernel.overloads.items() if set(types) == {numba.types.int64})
    return next(general).entry_point  # type: ignore[no-any-return]
