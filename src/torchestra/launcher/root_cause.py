"""Find the root cause: the rank whose failure ended a job, when several failed nearly together.

When a rank dies, its peers fail within milliseconds because it died, and sometimes their report comes
first: an exit takes time. Three facts tell cause from consequence, in this order: a rank that
reports "another rank is gone" is not the cause; one that a signal killed, and that could not report, is; of
the rest it is the earliest, by the host's one monotonic clock. A rank counts only if it failed before the
launcher began to stop the others.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torchestra.errors import GroupAbortedError
from torchestra.launcher.spec import Failure
from torchestra.system.user_frames import end_in_users_code

_OUR_FILES = str(Path(__file__).parent)


@dataclass(frozen=True)
class FailedRank:
    """The failure of a rank.

    Attributes:
        exit_code: its exit code; minus the signal's number where a signal killed it.
        time: ``time.monotonic()`` when the failure showed.
        failure: the rank's own report, if any.
        pid: its process, if it had one.
    """

    rank: int
    exit_code: int
    time: float
    failure: Failure | None = None
    pid: int | None = None

    @property
    def consequence(self) -> bool:
        """Return whether the rank failed because another one was gone."""
        return self.failure is not None and self.failure.consequence

    @property
    def shell_code(self) -> int:
        """Return the exit code that a shell would show, never 0: 128 and the number for a signal."""
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code or 1


class NodeFailure(NamedTuple):
    """The failure of another node, for which this node ends.

    Attributes:
        why: the reason, in one line.
    """

    node: int
    code: int
    why: str


def failure_from(error: BaseException, exception: bytes | None = None) -> Failure:
    """Return a rank's report of an uncaught exception, which loses its frames beneath the user's code.

    Args:
        error: the exception.
        exception: the same, pickled, if it is to be sent.
    """
    end_in_users_code(error)
    return Failure(
        time=time.monotonic(),
        exit_code=-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1,
        summary="".join(traceback.format_exception_only(type(error), error)).strip(),
        traceback="".join(
            traceback.format_exception(type(error), error, user_traceback(error.__traceback__))
        ),
        consequence=isinstance(error, (GroupAbortedError, ConnectionError)),
        exception=exception,
    )


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's frames at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
        trace = trace.tb_next
    return trace


def root_cause(failed_ranks: Iterable[FailedRank], survived: int = 0) -> FailedRank | None:
    """Return the failure that caused the others; None if no more than ``survived`` are given.

    Args:
        failed_ranks: the failures, of different ranks.
        survived: how many the job survives: the next one, in order from causes to consequences, is the cause.
    """
    ordered = sorted(
        failed_ranks, key=lambda failed: (failed.consequence, failed.exit_code >= 0, failed.time)
    )
    return ordered[survived] if len(ordered) > survived else None


def describe_exit(exit_code: int) -> str:
    """Return an exit code in words: ``exit code 3``, or ``killed by SIGSEGV``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"killed by {name}{hint}"
