"""Compiling once: a lock between processes, a word to the user when it takes long, and nothing half-made."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numba

Kernel = Callable[..., int]
T = TypeVar("T")

_ENGINE = Path(__file__).parent
_WITHOUT_KERNELS = ("multihost",)
# Several installations may share a cache directory: each has notes of its own.
_INSTALLATION = hashlib.sha256(f"{_ENGINE} {platform.python_version()}".encode()).hexdigest()[:16]


def cache_directory() -> Path:
    """Where torchestra keeps its lock and its notes about what is compiled (made if missing)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(root) / "torchestra"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _fingerprint() -> str:
    """Changes whenever Numba would compile anew: sources, versions, processor."""
    digest = hashlib.sha256()
    for word in (
        numba.__version__,
        platform.machine(),
        platform.python_version(),
        numba.core.config.CPU_NAME,
    ):
        digest.update(repr(word).encode())
    digest.update(_sources().encode())
    return digest.hexdigest()[:16]


def _sources() -> str:
    """Changes whenever a file of the engine does."""
    digest = hashlib.sha256()
    for source in sorted(_ENGINE.rglob("*.py")):
        if source.parent.name in _WITHOUT_KERNELS:
            continue
        digest.update(f"{source}:{source.stat().st_mtime_ns}".encode())
    return digest.hexdigest()


def forget_what_is_stale(functions: Iterable[Any]) -> None:
    """Empty Numba's cache of compiled functions that were made from other sources. With the lock held.

    Numba compiles a function anew when the file that it is written in has changed. But a kernel is made of
    functions and constants from several files, and would go on with their old versions.
    """
    sources = _sources()
    for folder in {Path(function.stats.cache_path) for function in functions if function.stats.cache_path}:
        # Beside what it tells of: who has another home directory finds the same functions there.
        note = folder / f"torchestra-sources-{_INSTALLATION}"
        if note.exists() and note.read_text() == sources:
            continue
        for index in folder.glob("*.nbi"):
            if not index.name.startswith("reductions."):  # made from one file only
                index.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(sources)


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Hold the lock that keeps ranks from compiling ``what`` side by side.

    The first process to come compiles, the others then find the result in Numba's cache. Where nothing
    that is cached can be known to fit, a line on stderr says that compilation is going on.
    """
    directory = cache_directory()
    own = f"compiled-{what}-{_INSTALLATION}"
    note = directory / f"{own}-{_fingerprint()}"
    with open(directory / "compile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = not note.exists()
        if fresh and what == "kernels":
            print(
                "torchestra: compiling its kernels for this machine (once, some 10 seconds)",
                file=sys.stderr,
                flush=True,
            )
        yield
        if fresh:
            for old in directory.glob(f"{own}-*"):
                old.unlink(missing_ok=True)
            note.touch()


def undisturbed(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, whatever signals come meanwhile. Only the caller's wait ends by them.

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
    thread.start()
    thread.join()  # not only the outcome: who forks next wants no thread beside it
    return outcome.result()


def entry_point(kernel: Any) -> Kernel:
    """The compiled function of a loaded kernel.

    Calling it spares the dispatcher's look at the types of the arguments, 0.1 to 0.3 µs; every
    argument must be an int.
    """
    # Where another kernel calls this one with a constant, there is a version made for that constant, too.
    general = (result for types, result in kernel.overloads.items() if set(types) == {numba.types.int64})
    return next(general).entry_point  # type: ignore[no-any-return]
