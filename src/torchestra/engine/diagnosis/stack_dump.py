"""Read the Python stack of a process of this host that cannot answer, as a thread of it holds the GIL.

The process has given a signal to faulthandler beforehand, whose handler writes the lines of all threads
into a memory file, in C, without the GIL. Another rank sends the signal and reads the file through /proc.
It does so only after the rank has failed to answer, and not if it is stopped: its frames stand still then.
(Were a frame to be left while faulthandler reads it, faulthandler might read freed memory; see its
documentation.)

The signal is the third highest real-time signal, or the one that TORCHESTRA_STACK_SIGNAL names, 0 for none.
It is not taken from a program that has a handler for it. Where there is none, stacks of such ranks are not
known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import threading
from pathlib import Path
from typing import NamedTuple

from torchestra.engine.diagnosis.facts import UserFrame
from torchestra.engine.diagnosis.source_lines import loops_at
from torchestra.engine.recorder.callsites import is_line_of_the_program
from torchestra.system.deadline import Deadline

SIGNAL_VARIABLE = "TORCHESTRA_STACK_SIGNAL"
_MEMORY_FILE = "stacks of torchestra"
_WAIT_SECONDS, _LOOK_SECONDS = 0.25, 0.01
_MAX_BYTES = 1 << 20
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class StackFile(NamedTuple):
    """How another process gets the stacks of this one: by which signal, in which descriptor of its own."""

    signal: int
    descriptor: int


_NONE = StackFile(0, 0)
_own: StackFile | None = None
_lock = threading.Lock()


def offer_stacks() -> StackFile:
    """Let other processes read the stacks of this one, from now on; return how, or zeros if they cannot."""
    global _own
    with _lock:
        if _own is None:
            _own = _offer()
        return _own


def _offer() -> StackFile:
    number = _signal_number()
    if number == 0 or not hasattr(os, "memfd_create"):
        return _NONE
    try:
        descriptor = os.memfd_create(_MEMORY_FILE, os.MFD_CLOEXEC)
    except OSError:
        return _NONE
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        os.close(descriptor)
        return _NONE
    return StackFile(number, descriptor)


def _signal_number() -> int:
    """Return the signal to use, 0 for none."""
    named = os.environ.get(SIGNAL_VARIABLE, "")
    number = int(named) if named.isdecimal() else signal.SIGRTMAX - 2
    return number if 0 < number < signal.NSIG and not _is_used(number) else 0


def _is_used(number: int) -> bool:
    """Return whether this process handles, ignores or blocks a signal, whoever has told it to."""
    bit = 1 << (number - 1)
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        masks = [line.split()[1] for line in lines if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
        return any(int(mask, 16) & bit for mask in masks)
    return True


def read_stack(pid: int, thread: int, offered: StackFile) -> list[tuple[bool, tuple[UserFrame, ...]]]:
    """Return the lines of the program on each thread's stack of another process, as far as they can be had.

    Takes a quarter of a second at most.

    Args:
        thread: the identifier of the one that runs the program.
        offered: how the process said that its stacks are read.

    Returns:
        Of each thread that has such lines, whether it is that one, and the lines, innermost first.
    """
    path = Path(f"/proc/{pid}/fd/{offered.descriptor}")
    if not offered.signal:
        return []
    text = ""
    with contextlib.suppress(OSError):
        if _MEMORY_FILE not in os.readlink(path):
            return []
        before = path.stat().st_size
        os.kill(pid, offered.signal)
        grown = before
        for _ in Deadline(_WAIT_SECONDS).polls(_LOOK_SECONDS):
            size = path.stat().st_size
            if size > before and size == grown:
                break
            grown = size
        with path.open("rb") as file:
            file.seek(before)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    return parse(text, thread)


def parse(text: str, thread: int) -> list[tuple[bool, tuple[UserFrame, ...]]]:
    """Return the program's lines in what faulthandler wrote; see :func:`read_stack` for the rest."""
    threads: list[tuple[bool, list[UserFrame]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            threads.append((int(head[1], 16) == thread, []))
        elif threads and (found := _FRAME.match(line)) is not None and is_line_of_the_program(found[1]):
            file, number, function = found[1], int(found[2]), found[3]
            threads[-1][1].append(UserFrame(file, number, function, 0, loops_at(file, number)))
    return [(is_program, tuple(frames)) for is_program, frames in threads if frames]
