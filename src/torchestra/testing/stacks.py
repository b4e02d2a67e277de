"""The stack of a rank, and its line of the test, when its time is up."""

from __future__ import annotations

import faulthandler
import itertools
import re
import signal
import threading
import traceback
from collections.abc import Sequence
from traceback import FrameSummary

from torchestra.system.user_frames import is_ours, is_users
from torchestra.testing.outcomes import Outcome

_SIGNAL = signal.SIGUSR1
_RUNNERS = ("/_pytest/", "/pluggy/", "/pytest_timeout")
_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_OUTERMOST = ("<module>", "_run_module_as_main", "_bootstrap")
_FRAME = re.compile(r'  File "(.*)", line (\d+)(?: in (.*))?$')


def dump_on_signal(path: str) -> None:
    """Make this process write the stacks of its threads to a file on SIGUSR1, whatever it is doing."""
    file = open(path, "w")  # noqa: SIM115, the signal may come until the process ends
    file.write(f"{threading.get_ident():x}\n")
    file.flush()
    global _dump_file  # keeps the file open: the handler has only its descriptor
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    _dump_file = file


_dump_file: object = None


def read_dump(path: str) -> tuple[list[FrameSummary], bool]:
    """Return the frames of the test's thread, the outermost first, and whether these are all.

    The process writes them one by one, the innermost first; no frames are there before it begins.
    """
    try:
        with open(path, errors="replace") as file:
            own, *lines = file.read().splitlines()
    except (OSError, ValueError):
        return [], False
    frames: list[FrameSummary] = []
    listening = whole = False
    for line in lines:
        if (head := _HEAD.match(line)) is not None:
            listening = int(head[1], 16) == int(own, 16)
        elif listening and (found := _FRAME.match(line)) is not None:
            frames.append(FrameSummary(found[1], int(found[2]), found[3] or "?"))
            whole = found[3] in _OUTERMOST
        elif listening and line.strip() == "...":  # faulthandler writes no more than a hundred
            whole = True
    return frames[::-1], whole


def late_outcome(rank: int, frames: Sequence[FrameSummary]) -> Outcome:
    """Return the outcome of a rank that was in these frames when its time was up."""
    runner = next((number for number, each in enumerate(frames) if _runs_tests(each.filename)), 0)
    frames = list(itertools.dropwhile(lambda each: not is_users(each.filename), frames[runner:]))
    inside = next((each for each in reversed(frames) if is_users(each.filename)), None)
    where = "outside of the test" if inside is None else _file_and_line(inside)
    stack = "".join(traceback.format_list([each for each in frames if not is_ours(each.filename)]))
    return Outcome(rank, text=f"It was here:\n{stack}", late=True, where=where)


def _runs_tests(path: str) -> bool:
    return any(part in path for part in _RUNNERS)


def _file_and_line(frame: FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
