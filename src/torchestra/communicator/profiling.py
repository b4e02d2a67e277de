"""Operations as torch's profilers see them: ranges like those of torch.distributed's groups.

With a profiler on (``torch.profiler.profile``, ``torch.autograd.profiler.profile``) a call of an operation is
two ranges, one in the other:

* ``torchestra::all_reduce``, for as long as the call took, waiting for other ranks included;
* ``gloo:all_reduce`` with the shapes of the tensors that it read (complex ones as pairs of reals). By this
  name, and by the mark as asynchronous, torch's tools and other programs recognize communication.

For asynchronous operations both describe the call that began them. On the threads that run these nothing is
recorded, since these threads are not profiled.

A flag of torch's, read when an operation begins, tells whether a profiler is on; while it is off nothing else
is done. Entries (engine/entries/) leave calls to the general way while it is on.
"""

from __future__ import annotations

import _thread
import contextlib
import re
import threading
from collections.abc import Iterator, Sequence

import torch
from torch._C._autograd import _profiler_type
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast

from torchestra.arguments.annotations import refuse_type

# torch names operations after Gloo's.
_FORM = re.compile(r"(_coalesced|_into_tensor|_tensor|_single)+$")


class _Within(threading.local):
    """Keep whether the thread is inside a recorded call: calls made in there belong to it."""

    a_call = False
    title: str | None = None


_within = _Within()


def wanted() -> bool:
    """Return whether the calling thread is being profiled, and is not inside of a recorded call already."""
    return not _within.a_call and _profiler_type() == ActiveProfilerType.KINETO


def record_comm(name: str) -> contextlib.AbstractContextManager[None]:
    """Give the operations that this thread calls in the block a name in profiles, such as a layer's.

    It takes the place of ``gloo:all_reduce``; ``torchestra::all_reduce`` around it stays. Blocks may be
    nested. Concerns the calling rank only.
    """
    if not isinstance(name, str):
        refuse_type("record_comm", "name", "a str", name)
    return _named(name)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    outer, _within.title = _within.title, name
    try:
        yield
    finally:
        _within.title = outer


@contextlib.contextmanager
def recorded(description: str, reads: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record the block as a call of an operation, given as ``name(details)``, that reads some tensors."""
    name = description.partition("(")[0]
    tensors = [
        tensor for tensor in reads if isinstance(tensor, torch.Tensor)
    ]  # anything else is about to be refused
    shown = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    call = _RecordFunctionFast(f"torchestra::{name}")
    communication = [_RecordFunctionFast(_within.title or f"gloo:{_FORM.sub('', name)}", shown)]
    _within.a_call = True
    call.__enter__()
    communication[0].__enter__()
    try:
        yield
    finally:
        call.__exit__()
        # A range is asynchronous for torch if it is left on another thread than it was entered on. There it
        # is left by being dropped, for __exit__ does nothing on a thread that is not profiled. The profiler
        # does not see that, and uses the end of the enclosing range; so the time of the drop does not matter.
        _thread.start_new_thread(communication.clear, ())
        _within.a_call = False
