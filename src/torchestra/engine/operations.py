"""What an operation is called for, packed into one word: the fingerprint that ranks compare.

Needs no torch, so that it can be read from outside of a job.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchestra.types import ReduceOp

if TYPE_CHECKING:
    import torch


class Kind(enum.IntEnum):
    """The operations of a group, by torch.distributed's names."""

    barrier = 0
    all_reduce = 1
    reduce = 2
    broadcast = 3
    all_gather = 4
    gather = 5
    scatter = 6
    reduce_scatter = 7
    all_to_all = 8
    send = 9
    recv = 10
    sparse_all_reduce = 20


DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}
"""The bytes of an element, by dtype. A dtype's code is its place in here."""

DTYPE_NAMES = tuple(DTYPE_BYTES)
_OPS = {code: ReduceOp(name) for code, name in enumerate(ReduceOp._NAMES)}
_KINDS = frozenset(Kind)
_NO_OP = 255
_NO_DTYPE = 255
UNEVEN = 1 << 62
"""Added to a count that is the hash of several lengths, and not a number of elements."""


def pack(
    kind: Kind, dtype: torch.dtype | None = None, op: ReduceOp | None = None, root: int | None = None
) -> int:
    """The word META of a control block: kind, reduce operation, dtype and root."""
    op_code = _NO_OP if op is None else op.code
    dtype_code = _NO_DTYPE if dtype is None else DTYPE_NAMES.index(str(dtype)[6:])
    root_code = 0 if root is None else root + 1
    return int(kind) | op_code << 8 | dtype_code << 16 | root_code << 24


def unit_of(meta: int) -> int:
    """The bytes per element of a fingerprint's dtype, 1 where it has none."""
    dtype = dtype_name(meta)
    return 1 if dtype is None else DTYPE_BYTES[dtype]


def kind_name(meta: int) -> str:
    """What the operation is called."""
    code = meta & 0xFF
    return Kind(code).name if code in _KINDS else f"operation of kind {code}"


def op_name(meta: int) -> str | None:
    """Of a reduction: how it reduces."""
    op = meta >> 8 & 0xFF
    return _OPS[op].name if op in _OPS else None


def dtype_name(meta: int) -> str | None:
    """Of what its tensors are, if of one dtype."""
    dtype = meta >> 16 & 0xFF
    return DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else None


def root_of(meta: int) -> int | None:
    """The root, of an operation that has one."""
    return (meta >> 24 & 0xFFFF) - 1 if meta >> 24 & 0xFFFF else None


def describe(meta: int, count: int) -> str:
    """What a fingerprint says, for people: ``all_reduce(SUM, float32, 1024 elements)``."""
    op, dtype, root = op_name(meta), dtype_name(meta), root_of(meta)
    words = [] if op is None else [op]
    if dtype is not None:
        words.append(dtype)
        if count >= UNEVEN:
            words.append("uneven sizes")
        elif count >= 0:
            words.append(f"{count} element{'' if count == 1 else 's'}")
    if root is not None:
        words.append(f"root {root}")
    return f"{kind_name(meta)}({', '.join(words)})"


def describe_lengths(meta: int, count: int, sent: Sequence[int], expected: Sequence[int]) -> str:
    """What :func:`describe` leaves out because a fingerprint only has the hash of it, or nothing.

    Args:
        sent, expected: by rank, how many bytes go there and come from there.
    """
    kind, unit = Kind(meta & 0xFF), unit_of(meta)
    sent, expected = ([length // unit for length in lengths] for lengths in (sent, expected))
    if kind in (Kind.all_to_all, Kind.scatter):
        return f" that sends {sent} and expects {expected} elements by rank"
    if count < UNEVEN:
        return ""
    return f" of {sent if kind is Kind.reduce_scatter else expected} elements by rank"
