"""The engine: collectives as compiled kernels over memory that the ranks of a group share.

Nothing here knows of default groups, global ranks or argument forms; it takes contiguous CPU tensors that
were checked, and ranks in the group's own numbering. See docs/algorithms.md.
"""

from __future__ import annotations

import sys

from torchestra.engine.native.kernel import load_object, set_builder
from torchestra.engine.native.object_files import make

__all__ = ["compile_kernels", "warm_up"]

if sys.byteorder != "little":
    # Ranks wait by futex for the lower half of 64-bit words, which is taken to come first.
    raise ImportError(
        "torchestra needs a little-endian processor: its ranks wait for the first half of 64-bit words in"
        f" shared memory; this one ({sys.byteorder}-endian) keeps the other half there"
    )


def warm_up() -> None:
    """Load every kernel, compiling them if no process has yet, so that a forked process need not.

    Takes some 5 seconds the first time on a machine and some 20 ms afterwards; leaves no thread running and
    nothing open.
    """
    load_object()


def compile_kernels() -> None:
    """Compile the kernels for exactly this processor and cache them, unless they already are."""
    make(_build)


def _build() -> bytes:
    from torchestra.engine.kernel_registry import build

    return build()


set_builder(_build)
