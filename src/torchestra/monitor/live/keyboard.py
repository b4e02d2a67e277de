"""Keys from a terminal, one at a time, without waiting for the end of a line."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import tty
from collections import deque
from types import TracebackType

from torchestra.system.interrupts import Interrupts

_SEQUENCES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\x1b": "escape", "\r": "enter", "\n": "enter", " ": "space",
}  # fmt: skip
# A sequence of a key that has no name here is one key, too, and not its single characters.
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|[^\x1b]|\x1b", re.DOTALL)


class Keyboard:
    """The keys of the standard input, which is a terminal; within ``with`` they come at once, and unseen.

    Args:
        interrupts: end the wait for a key.

    Where the standard input is something else, or the terminal has been hung up, no key ever comes.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._descriptor = -1
        self._before: list[object] | None = None
        self._keys: deque[str] = deque()

    def __enter__(self) -> Keyboard:
        with contextlib.suppress(OSError, ValueError, termios.error):
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)  # Ctrl-C still interrupts
            self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def read(self, timeout_s: float | None) -> str | None:
        """Return the next key: a character, or a name such as ``"up"``; None if none comes in time.

        Args:
            timeout_s: None: wait until one comes.
        """
        if not self._keys:
            if self._descriptor < 0:
                self._interrupts.wait(timeout_s)
                return None
            if not self._interrupts.wait(timeout_s, self._descriptor):
                return None
            try:
                text = os.read(self._descriptor, 256).decode(errors="replace")
            except OSError:
                text = ""
            if not text:  # the terminal is gone
                self._descriptor = -1
            self._keys.extend(_SEQUENCES.get(key, key) for key in _KEY.findall(text))
        return self._keys.popleft() if self._keys else None
