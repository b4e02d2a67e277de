"""What torchestra reads of what others have written, fed with bytes that nobody writes.

Each target (targets.py) reads some bytes as the product does. The property: a result, or an error that the
target names, in bounded time and memory; never another exception. The bytes are drawn, or made of what the
product itself writes: bits flipped, parts cut out, repeated, exchanged, lengths changed, two of them spliced.
``tests/attacks/test_fuzzing.py`` runs each for a moment, ``tools/fuzz.py`` for as long as wanted.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hypothesis import strategies as st

LONGEST_SECONDS = 5.0
"""The processor time that a target may take for one input."""
MAX_BYTES = 1 << 26
"""The memory of Python that a target may have taken for one input, at any time."""


class Target(NamedTuple):
    """Something to be fed.

    Attributes:
        name: what reads.
        seeds: what the product writes there.
        read: reads some bytes as the product does.
        errors: the exceptions that the callers of the product deal with.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]
    reserves: bool = False
    """It reserves memory of a length that it was told, and uses only what comes: that is not counted."""


class BrokenError(Exception):
    """A target took too much time or memory."""


def feed(target: Target, data: bytes) -> bool:
    """Have a target read some bytes; return whether it took them.

    Raises:
        BrokenError: it took too much time or memory.
        Exception: one that is not among those that the callers deal with.
    """
    with bounded(target.name, memory=not target.reserves):
        try:
            target.read(data)
        except target.errors:
            return False
        return True


@contextmanager
def bounded(name: str, *, memory: bool) -> Iterator[None]:
    """Raise BrokenError if the block takes too much time or memory."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        yield
    finally:
        took, (_, most) = time.thread_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if took > LONGEST_SECONDS or (memory and most > MAX_BYTES):
        raise BrokenError(f"{name} took {took:.1f} s of the processor and {most >> 20} MiB")


_INTERESTING = (
    b"",
    b"\0",
    b"\xff",
    b"\0" * 8,
    b"\xff" * 8,
    b"\x7f" * 8,
    b"Infinity",
    b"NaN",
    b"[]",
    b"{}",
    b"null",
)


@st.composite
def inputs(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Bytes for a target: drawn, or made of one or two of its seeds."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 1, 1, 2, 4, 8, 30, len(data)))))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            part = bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in data[start:end][:8])
        elif kind == 1:
            part = draw(st.sampled_from(_INTERESTING) | st.binary(max_size=12))
        elif kind == 2:
            part = data[start:end] * draw(st.integers(0, 3))
        elif kind == 3:
            part = draw(st.integers(-(1 << 63), (1 << 64) - 1)).to_bytes(9, "little", signed=True)[
                : end - start
            ]
        else:
            other = draw(st.sampled_from(seeds))
            part = other[draw(st.integers(0, len(other))) :]
        data = data[:start] + part + data[end:]
    return data
