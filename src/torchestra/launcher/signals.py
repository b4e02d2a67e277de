"""``torchestra run`` while its job runs: handling of signals, and of output without a reader."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from torchestra.errors import DistError
from torchestra.launcher.job import Job, StopPlan

_INTERRUPT: StopPlan = ((signal.SIGINT, 5.0), (signal.SIGTERM, 0.5))
_TERMINATE: StopPlan = ((signal.SIGTERM, 5.0),)
_KILL: StopPlan = ()
ENDING = {signal.SIGINT: _INTERRUPT, signal.SIGTERM: _TERMINATE, signal.SIGHUP: _TERMINATE}
"""The signals that end a job, each with its plan."""


class _SecondSignal(BaseException):
    """A signal came while an earlier one was still unhandled: the launcher hangs in its output."""


def run_job(job: Job, received: list[int]) -> int | None:
    """Run a job to its end; return an exit code if the end needs no report.

    The signals that ended it are added to ``received``; afterwards such signals are ignored.
    """
    try:
        with _signals_to(job, received):
            job.run()
    except BrokenPipeError:
        _give_up_output()
        return 128 + signal.SIGPIPE
    except _SecondSignal:
        pass
    except DistError as error:
        print(f"torchestra: {error}", file=sys.stderr)
        return 1
    return None


@contextlib.contextmanager
def _signals_to(job: Job, received: list[int]) -> Iterator[None]:
    """Apply signals that end or halt the job to the ranks; add those that end it to ``received``.

    A handler only notes the signal; the job's loop, which the signal wakes, acts on it.
    """
    unseen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if unseen and signum in ENDING:
            received.append(signum)
            raise _SecondSignal
        unseen.append(signum)
        job.loop.call_soon(act)

    def act() -> None:
        while unseen:
            signum = unseen.pop(0)
            if signum in ENDING:
                job.stop(_KILL if received else ENDING[signal.Signals(signum)])
                received.append(signum)
            elif signum == signal.SIGTSTP:
                job.signal(signal.SIGSTOP, final=False)
                os.kill(os.getpid(), signal.SIGSTOP)
                job.signal(signal.SIGCONT, final=False)

    for signum in (*ENDING, signal.SIGTSTP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, note)
    signal.set_wakeup_fd(job.loop.wakeup_fd)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)


def open_standard_files() -> None:
    """Open files 0, 1 and 2 if the caller closed them, lest a pipe or socket of ours takes their number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _give_up_output() -> None:
    """Discard buffered output: it has no reader, and must not fail once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
