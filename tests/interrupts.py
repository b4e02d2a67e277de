"""Interrupts at every point of some code at which Ctrl-C could come."""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any


class _Finalized:
    """Interrupts this process while Python finalizes it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(100):  # the handler has run by then
            pass


def lose_an_interrupt() -> None:
    """Interrupt this process where Python prints what the handler raises, and goes on."""
    with _quiet():
        _Finalized()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Print nothing of what finalizers raise: pytest takes that for a failure."""
    former, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = former


# After which instructions CPython looks for signals, and after which it does not, by how their names begin.
INTERRUPTIBLE = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
NOT_INTERRUPTIBLE = ("CALL_INTRINSIC", "JUMP_BACKWARD_NO_INTERRUPT")


@contextlib.contextmanager
def interrupted_at(place: int, files: Sequence[str]) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the place-th point in these files at which a signal can be seen.

    Only functions that the block calls are looked at. The list that it is handed tells where; it stays empty
    if there are not so many points.
    """
    left, where = place, []
    last: dict[FrameType, str] = {}  # the instruction that each frame has just executed

    def enter(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace = step  # first: Python 3.13 looks for it where opcodes are asked for
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "opcode":
            executed, last[frame] = last.get(frame, "RESUME"), names(frame.f_code)[frame.f_lasti]
            if executed.startswith(INTERRUPTIBLE) and not executed.startswith(NOT_INTERRUPTIBLE):
                left -= 1
                if left < 0:
                    where.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                    raise KeyboardInterrupt
        elif event == "exception":
            last[frame] = "raised"  # on the way to a handler it looks for none
        return step

    # Python 3.12 looks in settrace() for whether any frame has asked for opcodes: enter() would ask too late.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    try:
        yield where
    finally:
        sys.settrace(None)
        last.clear()


@functools.cache
def names(code: CodeType) -> dict[int, str]:
    """The instructions of some code, by their places."""
    return {each.offset: each.opname for each in dis.get_instructions(code)}
