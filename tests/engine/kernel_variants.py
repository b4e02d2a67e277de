"""The kernels once more, slower at chosen places, and with any one rule of the protocol broken on demand.

A test that has never seen the protocol fail proves nothing. So the modules of the engine are compiled a
second time, under other names and with some text replaced: copies, reductions and a few other places begin
with a pause now and then, which opens the windows that a broken rule leaves; and inside
``with broken(rule):`` all ranks of this process (threads) disregard the rule. Outside, these kernels must do
what the originals do.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np

from torchestra.engine.kernels import (
    buffers,
    eager,
    exchange,
    in_place,
    iovec,
    move,
    reduce,
    single_copy,
    waiting,
)
from torchestra.engine.native import atomics
from torchestra.engine.native.atomics import External, kernel
from torchestra.engine.native.kernel import Kernel, entry_point
from torchestra.engine.recorder import recorder


class Rule(IntEnum):
    """Name what can be broken."""

    FIRST_PIECE_BEFORE_ARRIVAL = 1
    COPY_BEFORE_PUBLISHING = 2
    THREE_PIPES = 3  # broken: two
    MORE_THAN_ONE_PIPE = 4
    TWO_SLOTS = 5
    MEETING = 6
    SEVERAL_LINES = 7  # broken: one
    PARTING = 8
    WRITE_BEFORE_LOOKING_FOR_SLEEPERS = 9
    TAKE_THE_STAMP_AWAY = 10
    STAMP_LAST = 11
    LOOK_AT_THE_STAMP_AGAIN = 12
    NOT_TOO_FAR_APART = 13
    LATE_BEFORE_PUBLISHING = 14


_switch = np.zeros(1, dtype=np.int64)
_SWITCH: int = _switch.ctypes.data
_rand = External("rand", "i32")
_usleep = External("usleep", "i32", "i32")
_load, _memcpy, _call_reduction = atomics.load_acquire, atomics.memcpy, atomics.call_reduction


@contextlib.contextmanager
def broken(rule: Rule | None) -> Iterator[None]:
    """All threads that run the kernels of this module disregard the rule while the block runs."""
    _switch[0] = rule or 0
    try:
        yield
    finally:
        _switch[0] = 0


@kernel
def is_broken(rule):
    return _load(_SWITCH) == rule


@kernel
def pause():
    """One time in three, let the other ranks run for a while."""
    if _rand() % 3 == 0:
        _usleep(60)


@kernel
def slow_memcpy(target, source, length):
    if length > 0:
        pause()
        _memcpy(target, source, length)


@kernel
def slow_reduction(function, target, sources, number, count):
    pause()
    _call_reduction(function, target, sources, number, count)


# Per module: a text that must occur in it, and what stands in place of all its occurrences. A step that is
# published a second time is no harm, so what is published too early is also published when it should be.
_EDITS: dict[ModuleType, list[tuple[str, str]]] = {
    recorder: [
        (
            "    store_release(entry + STAMP, 0)\n    release_fence()\n    store(entry + BEGAN, began)\n",
            "    if not is_broken(TAKE_THE_STAMP_AWAY):\n"
            "        store_release(entry + STAMP, 0)\n"
            "        release_fence()\n"
            "    if is_broken(STAMP_LAST):\n"
            "        store_release(entry + STAMP, stamp)\n"
            "    store(entry + BEGAN, began)\n"
            "    pause()\n",
        ),
        (
            "            store(copy + offset, load_acquire(entry + offset))\n",
            "            store(copy + offset, load_acquire(entry + offset))\n"
            "            if offset == WHAT:\n"
            "                pause()\n",
        ),
        (
            "        if stamp != 0 and load_acquire(entry + STAMP) == stamp:\n",
            "        if stamp != 0 and (\n"
            "            is_broken(LOOK_AT_THE_STAMP_AGAIN) or load_acquire(entry + STAMP) == stamp\n"
            "        ):\n",
        ),
    ],
    waiting: [
        (
            "    store_ordered(line, (load(context + SEQUENCE) << STEP_BITS) + step)\n"
            "    _wake_if_any(context, line)\n",
            "    if is_broken(WRITE_BEFORE_LOOKING_FOR_SLEEPERS):\n"
            "        _wake_if_any(context, line)\n"
            "    pause()\n"
            "    store_ordered(line, (load(context + SEQUENCE) << STEP_BITS) + step)\n"
            "    if not is_broken(WRITE_BEFORE_LOOKING_FOR_SLEEPERS):\n"
            "        _wake_if_any(context, line)\n",
        ),
        (
            "    store_release(line, (load(context + SEQUENCE) << STEP_BITS) + 1)\n",
            "    if is_broken(WRITE_BEFORE_LOOKING_FOR_SLEEPERS):\n"
            "        _wake_if_any(context, line)\n"
            "    pause()\n"
            "    store_release(line, (load(context + SEQUENCE) << STEP_BITS) + 1)\n",
        ),
        (
            "    full_fence()\n    _wake_if_any(",
            "    full_fence()\n"
            "    if not is_broken(WRITE_BEFORE_LOOKING_FOR_SLEEPERS):\n"
            "        _wake_if_any(",
        ),
        (
            "    if load(context + SEEN) < begun:\n",
            "    if load(context + SEEN) < begun and not is_broken(NOT_TOO_FAR_APART):\n",
        ),
        (
            "    verdict = DONE\n",
            "    verdict = DONE\n    if is_broken(MEETING):\n        return DONE\n",
        ),
        (
            "            line = flag_line(context, peer, sequence)\n            metas",
            "            pause()\n            line = flag_line(context, peer, sequence)\n            metas",
        ),
        (
            "FLAG_LINES + (sequence & (FLAGS - 1)) * LINE\n",
            "FLAG_LINES + (0 if is_broken(SEVERAL_LINES) else sequence & (FLAGS - 1)) * LINE\n",
        ),
        (
            "    code = wait_for_step(context, 2)\n",
            "    code = DONE if is_broken(PARTING) else wait_for_step(context, 2)\n",
        ),
    ],
    buffers: [
        (
            "        parity = load(context + SEQUENCE) & 1\n",
            "        parity = 0 if is_broken(TWO_SLOTS) else load(context + SEQUENCE) & 1\n",
        ),
        (
            "chunk % 3",
            "chunk % (1 if is_broken(MORE_THAN_ONE_PIPE) else 2 if is_broken(THREE_PIPES) else 3)",
        ),
    ],
    iovec: [],
    in_place: [],
    eager: [
        (  # broadcast
            "        if rank == root:\n            memcpy(eager_piece",
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            post(context, meta, count)\n"
            "        if rank == root:\n            memcpy(eager_piece",
        ),
    ],
    single_copy: [],
    exchange: [
        (
            "        _tell_splits(context)\n",
            "        _tell_splits(context)\n"
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, NOT_SHARED)\n",
        ),
        (
            "        if iteration < parts:\n            _leave_parts",
            "        if 0 < iteration < parts and is_broken(COPY_BEFORE_PUBLISHING):\n"
            "            publish(context, iteration + 1 + extra)\n"
            "        if iteration < parts:\n            _leave_parts",
        ),
    ],
    move: [
        (  # share
            "_wanted_bytes(context)), apart(longest))\n        if code != DONE:\n            return code\n",
            "_wanted_bytes(context)), apart(longest))\n        if code != DONE:\n            return code\n"
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, offset_in_heap(context, source))\n",
        ),
        (  # share
            "        _leave_part(context, iteration",
            "        if 0 < iteration < parts and is_broken(COPY_BEFORE_PUBLISHING):\n"
            "            publish(context, iteration + 1 + extra)\n"
            "        _leave_part(context, iteration",
        ),
    ],
    reduce: [
        (  # all_reduce, direct
            "        fill(context, first_piece(context, rank, length), address, length)\n",
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, NOT_SHARED)\n"
            "        fill(context, first_piece(context, rank, length), address, length)\n",
        ),
        (  # all_reduce of parts, direct
            "        copy_in(context, parts, number, 0, count",
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, NOT_SHARED)\n"
            "        copy_in(context, parts, number, 0, count",
        ),
        (  # all_reduce, chunked
            "        if shared == NOT_SHARED:\n            _leave_pieces",
            "        if is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, shared)\n"
            "        if shared == NOT_SHARED:\n            _leave_pieces",
        ),
        (
            "    if is_late(context):\n",
            "    if is_late(context):\n"
            "        if is_broken(LATE_BEFORE_PUBLISHING):\n            publish(context, 2)\n",
        ),
        (
            "        if iteration < chunks:\n            _leave_pieces",
            "        if iteration <= chunks and is_broken(COPY_BEFORE_PUBLISHING):\n"
            "            publish(context, iteration + 1 + late)\n"
            "        if iteration < chunks:\n            _leave_pieces",
        ),
        (  # reduce_scatter
            "        offset = iteration * chunk * unit\n        if iteration < parts",
            "        if iteration == 0 and is_broken(FIRST_PIECE_BEFORE_ARRIVAL):\n"
            "            arrive(context, meta, count, NOT_SHARED)\n"
            "        if 0 < iteration < parts and is_broken(COPY_BEFORE_PUBLISHING):\n"
            "            publish(context, iteration + 1)\n"
            "        offset = iteration * chunk * unit\n        if iteration < parts",
        ),
    ],
}


@functools.cache
def _modules() -> dict[ModuleType, ModuleType]:
    """The edited copies. What they import of each other is each other; nothing else sees them."""
    names = {module.__name__: "edited_" + module.__name__.rpartition(".")[2] for module in _EDITS}
    copies = {module: ModuleType(names[module.__name__]) for module in _EDITS}
    given = {rule.name: int(rule) for rule in Rule}
    try:
        for module, copy in copies.items():
            source = inspect.getsource(module)
            for old, new in _EDITS[module]:
                assert old in source, f"{module.__name__} has changed: adapt the edit of\n{old}"
                source = source.replace(old, new)
            source = source.replace("memcpy(", "slow_memcpy(")
            source = source.replace("    fill(context, ", "    slow_memcpy(")
            source = source.replace("call_reduction(", "slow_reduction(")
            for name, edited in names.items():
                source = source.replace(f"from {name} ", f"from {edited} ")
            vars(copy).update(
                given,
                is_broken=is_broken,
                pause=pause,
                slow_memcpy=slow_memcpy,
                slow_reduction=slow_reduction,
            )
            sys.modules[copy.__name__] = copy
            place = f"<{copy.__name__}>"
            linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
            exec(compile(source, place, "exec"), vars(copy))
    finally:
        for name in names.values():
            sys.modules.pop(name, None)
    return copies


@functools.cache
def edited(kernel: Any) -> Kernel:
    """The edited copy of a kernel (``move.share``), compiled. It takes only ints."""
    module = next(module for module in _EDITS if getattr(module, kernel.__name__, None) is kernel)
    return entry_point(getattr(_modules()[module], kernel.__name__))
