"""Where in the user's program a rank is: the innermost line outside of torchestra and torch."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).parent.parent)
_NOT_THE_USERS = (_PACKAGE, str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])


def call_site(thread: int | None = None) -> str:
    """``file:line in function`` of the thread with this identifier (default: the calling one)."""
    frame: FrameType | None = sys._current_frames().get(thread or threading.get_ident())
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no line: its thread has ended"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
