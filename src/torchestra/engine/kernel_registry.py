"""All kernels, with the number of their arguments, and how they are loaded."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from numba import types
from numba.core.dispatcher import Dispatcher

from torchestra.engine.kernels import control, doorbell, move, reduce, reductions
from torchestra.engine.native.compilation import compiling, forget_what_is_stale, undisturbed, use_caches
from torchestra.engine.p2p import warm_up_channels, warm_up_posting
from torchestra.engine.recorder import clock, message_records, recorder
from torchestra.types import ReduceOp

_KERNELS: dict[Any, int] = {
    move.barrier: 2,
    move.share: 3,
    move.all_gather: 4,
    move.broadcast: 3,
    move.exchange: 2,
    move.all_to_all_even: 4,
    reduce.all_reduce: 3,
    reduce.all_reduce_parts: 4,
    reduce.reduce_scatter: 4,
    reduce.reduce_scatter_even: 4,
    doorbell.ring: 1,
    doorbell.hurry: 1,
    doorbell.close: 1,
    doorbell.await_task: 1,
    control.read: 1,
    control.tell: 2,
    control.claim: 1,
    control.replace: 3,
    control.ask: 1,
    control.await_question: 3,
    control.wake_everybody: 1,
    control.next_inside: 2,
    control.write_to_pages: 3,
    control.publish_step: 2,
    control.await_step: 2,
    recorder.fail_entry: 1,
    recorder.read_ring: 2,
    message_records.open_parcel: 5,
    message_records.parcel_came: 3,
    message_records.close_parcel: 5,
    clock.read_clock: 2,
}

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
        for kernel, arguments in _KERNELS.items():
            kernel.compile((types.int64,) * arguments)
            kernel.disable_compile()
        warm_up_channels()
        warm_up_posting()
    for dtype in (torch.float32, torch.float64, torch.int64):
        reductions.reduction(dtype, ReduceOp.SUM)
    reductions.reduction(torch.float32, ReduceOp.AVG)


def _compiled_functions() -> list[Any]:
    """Every function of the engine that Numba compiles."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torchestra.engine")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
