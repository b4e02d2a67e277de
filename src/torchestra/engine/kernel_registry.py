"""The kernels that Python calls, and how they are loaded."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from numba import types
from numba.core.dispatcher import Dispatcher

from torchestra.engine.kernels import doorbell, move, prefix, reduce, reductions, shared_words
from torchestra.engine.native.compilation import compiling, forget_what_is_stale, undisturbed, use_caches
from torchestra.engine.p2p import warm_up_channels, warm_up_endpoint
from torchestra.engine.recorder import clock, message_records, recorder
from torchestra.types import ReduceOp

_KERNELS: tuple[Any, ...] = (
    move.barrier,
    move.share,
    move.all_gather,
    move.broadcast,
    move.exchange,
    move.all_to_all_even,
    reduce.all_reduce,
    reduce.all_reduce_iovec,
    reduce.reduce_scatter,
    reduce.reduce_scatter_even,
    prefix.scan,
    doorbell.ring,
    doorbell.start_now,
    doorbell.close,
    doorbell.await_task,
    shared_words.load_acquire,
    shared_words.store_ordered,
    shared_words.compare_exchange,
    shared_words.increment_and_wake,
    shared_words.sleep_while,
    shared_words.wake_everybody,
    shared_words.next_reader,
    shared_words.write_to_pages,
    shared_words.publish_step,
    shared_words.await_step,
    recorder.fail_entry,
    recorder.read_ring,
    message_records.open_remote_message,
    message_records.remote_message_came,
    message_records.close_remote_message,
    clock.read_clock,
)

_loaded = False
_loading = threading.Lock()


def load_kernels() -> None:
    """Compile, or load from the cache, all kernels and the commonest reductions; once a process."""
    if not _loaded:
        undisturbed(_load_once)


def _load_once() -> None:
    global _loaded
    with _loading:
        if not _loaded:
            _load()
            _loaded = True


def _load() -> None:
    functions = _compiled_functions()
    use_caches(functions)
    with compiling("kernels"):
        forget_what_is_stale(functions)
        for kernel in _KERNELS:
            kernel.compile(signature(kernel))
            kernel.disable_compile()
        warm_up_channels()
        warm_up_endpoint()
    for dtype in (torch.float32, torch.float64, torch.int64):
        reductions.reduction(dtype, ReduceOp.SUM)
    reductions.reduction(torch.float32, ReduceOp.AVG)


def signature(kernel: Any) -> tuple[types.Integer, ...]:
    """Return the types of a kernel's arguments, which are all words."""
    arguments: int = kernel.py_func.__code__.co_argcount
    return (types.int64,) * arguments


def _compiled_functions() -> list[Any]:
    """Every function of the engine that Numba compiles."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torchestra.engine")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
