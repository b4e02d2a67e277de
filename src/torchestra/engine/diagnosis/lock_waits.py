"""Find which threads of this process wait for locks of the threading module, and which threads hold these.

CPython tells neither. But a thread that waits for a lock stands in the instruction of a ``with`` statement
or of a call of ``acquire``, in the program or in the standard library for it; the expression there leads to
the lock, and the ``with`` blocks that other threads are in lead to those that they hold (an RLock names its
owner itself). Expressions are only looked up, never run: names, attributes that are plain data, and items of
lists and dicts.

A thread may also wait for the end of another, or of what an executor's thread runs for it. That is told only
if the other waits for a lock that the former holds, so that it will never end.
"""

from __future__ import annotations

import _thread
import ast
import concurrent.futures
import concurrent.futures.thread
import inspect
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torchestra.engine.diagnosis.facts import LockWait
from torchestra.engine.diagnosis.source_lines import Position, acquired_at, held_at
from torchestra.engine.recorder.callsites import is_of_the_program, is_of_the_standard_library

_LOCK, _RLOCK = _thread.LockType, type(threading.RLock())
_OWNER = re.compile(r"owner=(\d+)")
_MISSING = object()
_MAX_FRAMES = 8  # of the program, of each thread
_JOIN, _ACQUIRE = threading.Thread.join.__code__, threading.Semaphore.acquire.__code__
_RESULTS = (concurrent.futures.Future.result.__code__, concurrent.futures.Future.exception.__code__)
_WORK = getattr(getattr(concurrent.futures.thread, "_WorkItem", None), "run", None)


class ThreadStack(NamedTuple):
    """A thread as it was found.

    Attributes:
        name: of the thread.
        frame: its innermost frame.
        still: it has not moved while it was looked at.
        inside: the function of torchestra that it is in.
    """

    name: str
    frame: FrameType
    still: bool
    inside: str


@dataclass(frozen=True)
class _Wait:
    """What a thread waits for: a lock, or the end of a thread."""

    lock: object = None
    text: str = ""
    thread: int | None = None


def find_lock_wait(threads: Mapping[int, ThreadStack], program: int) -> LockWait | None:
    """Return the lock that a thread waits for, or None if it waits for none that can be found.

    Args:
        threads: all of this process, by identifier.
        program: which of them.
    """
    wait = _wait_of(program, threads) if program in threads else None
    if wait is None:
        return None
    site = _site(threads[program].frame)
    holder = _holder(wait, threads)
    if holder is None:
        return LockWait(wait.text, site)
    waits, closed, thread = {program: wait}, False, holder
    while not closed:
        closed = thread in waits
        further = _wait_of(thread, threads)
        follow = _holder(further, threads) if further is not None else None
        if further is None or follow is None:
            break
        waits[thread] = further
        thread = follow
    if wait.thread is not None and not (closed and any(each.text for each in waits.values())):
        return None
    holding, next_lock = threads[holder], waits.get(holder, _Wait()).text
    where = _site(holding.frame)
    return LockWait(wait.text, site, holding.name, where, closed, holding.inside, next_lock)


def _wait_of(ident: int, threads: Mapping[int, ThreadStack]) -> _Wait | None:
    """Return what a thread waits for: a lock that is locked, and that its line acquires; or a thread."""
    thread = threads[ident]
    if not thread.still:
        return None
    frame: FrameType | None = thread.frame
    # The frames of Condition.__enter__ and Semaphore.acquire; those of other waits are for no lock.
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        of_semaphore = frame.f_code.co_name == "wait" and _is_called_by(frame, _ACQUIRE)
        if frame.f_code.co_name not in ("__enter__", "acquire") and not of_semaphore:
            return _end_awaited(thread.frame, threads)
        frame = frame.f_back
    if frame is None or not (is_of_the_program(frame) or is_of_the_standard_library(frame)):
        return None
    return _lock_awaited(frame) or _end_awaited(thread.frame, threads)


def _is_called_by(frame: FrameType, code: CodeType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is code


def _end_awaited(innermost: FrameType, threads: Mapping[int, ThreadStack]) -> _Wait | None:
    """Return the thread whose end another waits for, or the end of what it runs for a future."""
    frame: FrameType | None = innermost
    while frame is not None and not is_of_the_program(frame):
        code, names = frame.f_code, frame.f_locals
        if (code is _JOIN or code in _RESULTS) and names.get("timeout") is None:
            awaited = names.get("self")
            if isinstance(awaited, threading.Thread):
                return _Wait(thread=awaited.ident) if awaited.ident in threads else None
            runs = [each for each, stack in threads.items() if _runs(stack, awaited)]
            return _Wait(thread=runs[0]) if runs else None
        frame = frame.f_back
    return None


def _runs(thread: ThreadStack, future: object) -> bool:
    """Return whether a thread of an executor does the work of a future."""
    frame: FrameType | None = thread.frame
    while frame is not None:
        if _WORK is not None and frame.f_code is _WORK.__code__:
            return getattr(frame.f_locals.get("self"), "future", None) is future
        frame = frame.f_back
    return False


def _lock_awaited(frame: FrameType) -> _Wait | None:
    code = frame.f_code
    found = []
    for expression in acquired_at(code.co_filename, frame.f_lineno, _position(frame)):
        lock = _lock_of(_value(expression, frame))
        if lock is not None and _is_locked(lock):
            found.append(_Wait(lock, _named(expression, frame)))
    return found[0] if len(found) == 1 else None


def _named(expression: ast.expr, frame: FrameType) -> str:
    """Return an expression as the program has it; in the standard library, self is named by its class."""
    text = ast.unparse(expression)
    if is_of_the_program(frame) or not text.startswith("self."):
        return text
    return f"{type(frame.f_locals.get('self')).__name__}{text.removeprefix('self')}"


def _position(frame: FrameType) -> Position | None:
    """Return the position of the instruction that a frame is in; Python 3.10 does not tell."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or frame.f_lasti < 0:
        return None
    found = next((each for number, each in enumerate(positions()) if number == frame.f_lasti // 2), None)
    return None if found is None or None in found else found


def _holder(wait: _Wait, threads: Mapping[int, ThreadStack]) -> int | None:
    """Return the thread that holds a lock, if that can be told; or whose end is awaited."""
    if wait.thread is not None:
        return wait.thread
    lock = wait.lock
    if isinstance(lock, _RLOCK):
        owner = _OWNER.search(repr(lock))
        return int(owner[1]) if owner is not None and int(owner[1]) in threads else None
    holders = [thread for thread, stack in threads.items() if _holds(stack, lock)]
    return holders[0] if len(holders) == 1 else None


def _holds(stack: ThreadStack, lock: object) -> bool:
    frame: FrameType | None = stack.frame
    looked_at = 0
    while frame is not None and looked_at < _MAX_FRAMES:
        if is_of_the_program(frame):
            looked_at += 1
            code = frame.f_code
            for expression in held_at(code.co_filename, frame.f_lineno, _position(frame)):
                if _lock_of(_value(expression, frame)) is lock:
                    return True
        frame = frame.f_back
    return False


def _lock_of(value: object) -> object | None:
    """Return the lock that entering an object acquires, or None if it is none that we know."""
    if isinstance(value, threading.Condition):
        value = vars(value).get("_lock")
    return value if isinstance(value, (_LOCK, _RLOCK, threading.Semaphore)) else None


def _is_locked(lock: Any) -> bool:
    if isinstance(lock, threading.Semaphore):
        return vars(lock).get("_value") == 0
    return bool(lock.locked()) if isinstance(lock, _LOCK) else repr(lock).startswith("<locked")


def _value(expression: ast.expr, frame: FrameType) -> object:
    """Return the value of an expression in a frame, if finding it runs nothing."""
    if isinstance(expression, ast.Name):
        local = frame.f_locals.get(expression.id, _MISSING)
        return frame.f_globals.get(expression.id, _MISSING) if local is _MISSING else local
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, frame)
        found = _MISSING if owner is _MISSING else inspect.getattr_static(owner, expression.attr, _MISSING)
        return _MISSING if hasattr(type(found), "__get__") else found
    if isinstance(expression, ast.Subscript):
        container, key = _value(expression.value, frame), _key(expression.slice, frame)
        if type(container) in (list, dict, tuple) and type(key) in (int, str):
            try:
                return container[key]  # type: ignore[index]
            except LookupError:
                return _MISSING
    return _MISSING


def _key(expression: ast.expr, frame: FrameType) -> object:
    return expression.value if isinstance(expression, ast.Constant) else _value(expression, frame)


def _site(frame: FrameType | None) -> str:
    while frame is not None and not is_of_the_program(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
