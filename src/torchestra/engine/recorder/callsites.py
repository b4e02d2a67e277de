"""Find where in the user's program a rank is: the innermost line outside of torchestra and torch."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import torch

_FOLDERS = (Path(__file__).parents[2], Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"])
_NOT_THE_USERS = (*(os.path.join(folder, "") for folder in _FOLDERS), "<frozen ")


def call_site(thread: int | None = None, otherwise: int | None = None) -> str:
    """Return ``file:line in function`` of a thread.

    Args:
        thread: its identifier; default: the calling one.
        otherwise: the thread to report on if that one is torchestra's own, without a line of the program.
    """
    # Not the frame of this function, which would keep itself alive, and with it all that its callers hold.
    own = thread is None or thread == threading.get_ident()
    frame: FrameType | None = sys._getframe(1) if own else sys._current_frames().get(thread or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None and otherwise not in (None, thread or threading.get_ident()):
        return call_site(otherwise)
    frame = frame or innermost
    if frame is None:
        return "no line: its thread has ended"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
