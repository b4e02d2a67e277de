"""Find where in the user's program a rank is: the innermost line outside of torchestra, torch and pytest.

The standard library (threading, concurrent.futures, runpy) and pytest with its plug-ins run the program, and
are no part of it. Other packages are, wherever Python has them installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType

from torchestra.system.thread_frames import current_frames, without_collections

_MAX_CHARACTERS = 200
_TEST_RUNNERS = ("_pytest", "pytest", "pluggy", "pytest_timeout", "xdist", "execnet")


def _installed(names: Iterable[str]) -> Iterator[str]:
    """Return where packages, and modules in one file, lie that are installed; imports none of them."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            # The trailing separator keeps folders out whose names only begin alike.
            yield (
                os.path.join(os.path.dirname(spec.origin), "")
                if spec.submodule_search_locations
                else spec.origin
            )


_TORCHESTRA, _TORCH = _installed(("torchestra", "torch"))
_NOT_THE_USERS = (
    _TORCHESTRA,
    _TORCH,
    *_installed(("llvmlite", *_TEST_RUNNERS)),  # llvmlite calls kernels
    "<frozen ",
)
_STANDARD_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
# Where Python runs in no virtual environment, they may lie within the standard library's folder.
_PACKAGES = tuple(
    os.path.join(_STANDARD_LIBRARY, folder, "") for folder in ("site-packages", "dist-packages")
)


def is_of_the_program(frame: FrameType) -> bool:
    """Return whether a frame is the user's: not of torchestra, torch, the standard library or pytest."""
    return is_line_of_the_program(frame.f_code.co_filename)


def is_of_the_standard_library(frame: FrameType) -> bool:
    """Return whether a frame is of a module of Python's."""
    file = frame.f_code.co_filename
    return file.startswith(_STANDARD_LIBRARY) and not file.startswith(_PACKAGES)


def is_of_torchestra(frame: FrameType) -> bool:
    """Return whether a frame is of torchestra."""
    return frame.f_code.co_filename.startswith(_TORCHESTRA)


def is_line_of_the_program(file: str) -> bool:
    """Return whether a source file is the user's."""
    if file.startswith(_STANDARD_LIBRARY) and not file.startswith(_PACKAGES):
        return False
    return not file.startswith(_NOT_THE_USERS)


def exception_text(error: BaseException) -> str:
    """Return an exception in one line: ``ValueError: a damaged image``."""
    text = str(error).partition("\n")[0][:_MAX_CHARACTERS]
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def raise_site(error: BaseException) -> str:
    """Return the innermost line of the program that an exception came through; nothing if there is none."""
    lines = [
        each for each in traceback.extract_tb(error.__traceback__) if is_line_of_the_program(each.filename)
    ]
    return f"{lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""


def call_site(thread: int | None = None, otherwise: int | None = None) -> str:
    """Return ``file:line in function`` of a thread; of one that is in no line of the program, that it is not.

    Of a thread that torch has started in Python, such as one that saves a checkpoint, it is torch's line.

    Args:
        thread: its identifier; default: the calling one.
        otherwise: the thread to report on if that one is torchestra's own, without a line of the program.
    """
    if thread is None or thread == threading.get_ident():
        # Not the frame of this function, which would keep itself alive, and all that its callers hold.
        return _site_of(sys._getframe(1), threading.get_ident(), otherwise)
    with without_collections():
        return _site_of(current_frames().get(thread), thread, otherwise)


def _site_of(frame: FrameType | None, thread: int, otherwise: int | None) -> str:
    """Return the line of a thread, by its innermost frame; see :func:`call_site`."""
    innermost = outermost = frame
    started_by: FrameType | None = None
    while frame is not None and not is_of_the_program(frame):
        if not is_of_the_standard_library(frame):
            started_by = frame
        outermost, frame = frame, frame.f_back
    if frame is None and _is_torchs_own_thread(outermost, started_by):
        frame = started_by
    if frame is None and otherwise not in (None, thread):
        return call_site(otherwise)
    frame = frame or innermost
    if frame is None:
        return "no line: its thread has ended"
    if is_of_torchestra(frame):
        return f"no line of the program, but in torchestra's {frame.f_code.co_name}()"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_torchs_own_thread(outermost: FrameType | None, started_by: FrameType | None) -> bool:
    """Return whether torch's Python code has started a thread: not C++, as for backward, and not torchestra.

    Args:
        outermost: the first frame of the thread.
        started_by: the first one that is not of the standard library.
    """
    return (
        outermost is not None
        and started_by is not None
        and is_of_the_standard_library(outermost)
        and started_by.f_code.co_filename.startswith(_TORCH)
    )
