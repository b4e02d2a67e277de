"""The operations on raw addresses: atomic loads and stores, copies, and the processor's spin hint.

Every address is an integer that points into an arena (memory which several ranks share) or into a
tensor. A word that two ranks touch is only ever touched through the functions here, and each names its
ordering, so that the protocols above rely on the C11 memory model and not on x86:

- ``load_acquire`` / ``store_release``: what the writer wrote before the release is seen by a reader
  whose acquire saw it.
- ``store_ordered`` / ``load_ordered``: sequentially consistent. Needed only where a rank writes one word
  and then reads another that its peer writes and reads the other way round (see waiting.py).
- ``load`` / ``store``: plain, for words that only one rank writes, published by one of the above.

Here they are declared; intrinsic_code.py has their machine code.
"""

# mypy: disable-error-code="no-untyped-def, empty-body"

from __future__ import annotations

from torchestra.engine.native.declarations import External
from torchestra.engine.native.kernel import intrinsic, kernel, short_kernel

__all__ = [
    "External",
    "call_function",
    "call_reduction",
    "clock_gettime",
    "compare_exchange",
    "counter",
    "fetch_add",
    "full_fence",
    "kernel",
    "load",
    "load_acquire",
    "load_ordered",
    "memcpy",
    "process_vm_readv",
    "release_fence",
    "sched_yield",
    "short_kernel",
    "spin_hint",
    "store",
    "store_ordered",
    "store_release",
    "stream_fence",
    "stream_line",
    "syscall",
]


@intrinsic
def load(address):
    """Return the word, in no order with anything."""


@intrinsic
def load_acquire(address):
    """Return the word, and see all that was written before it was released."""


@intrinsic
def load_ordered(address):
    """Return the word, sequentially consistent."""


@intrinsic
def store(address, value):
    """Write the word, in no order with anything."""


@intrinsic
def store_release(address, value):
    """Write the word, after all that was written before."""


@intrinsic
def store_ordered(address, value):
    """Write the word, sequentially consistent."""


@intrinsic
def fetch_add(address, amount):
    """Add ``amount`` to the word, sequentially consistent, and return what it was."""


@intrinsic
def compare_exchange(address, expected, desired):
    """Set the word to ``desired`` if it is ``expected``; return what it was, sequentially consistent."""


@intrinsic
def spin_hint():
    """Tell the processor that this is a spin loop (``pause`` on x86, ``isb`` on 64-bit ARM)."""


@intrinsic
def release_fence():
    """Nothing that is stored later is seen before what was stored earlier. No instruction on x86."""


@intrinsic
def full_fence():
    """Fence, sequentially consistent: later loads are not done before earlier stores are seen."""


@intrinsic
def counter():
    """Return the processor's time counter (``rdtsc`` on x86, ``cntvct_el0`` on 64-bit ARM), or 0 elsewhere.

    Some 10 ns, against 24 of ``clock_gettime``. See clock.py for where it may be relied on.
    """


@intrinsic
def stream_line(target, source):
    """Copy 64 bytes past the caches (non-temporal store); ``target`` must be a multiple of 64."""


@intrinsic
def stream_fence():
    """Make earlier non-temporal stores visible before anything that is stored later."""


@intrinsic
def call_function(function, first, second):
    """Call a C function of two words by its address; return its result, a word or a part of one."""


@intrinsic
def call_reduction(function, target, sources, number, count):
    """Call a reduction (see reductions.py) by its address."""


memcpy = External("memcpy", "i64", "i64", "i64", "i64")
clock_gettime = External("clock_gettime", "i32", "i32", "i64")
sched_yield = External("sched_yield", "i32")
syscall = External("syscall", *["i64"] * 8)
process_vm_readv = External("process_vm_readv", *["i64"] * 7)
