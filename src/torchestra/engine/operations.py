"""What an operation is called for, packed into one word: the fingerprint that ranks compare."""

from __future__ import annotations

import enum

import torch

from torchestra.types import ReduceOp


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


DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "complex64",
        "complex128",
        "complex32",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "qint8",
        "quint8",
        "qint32",
    )
    if hasattr(torch, name)
)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}

_OPS = {code: ReduceOp(name) for code, name in enumerate(ReduceOp._NAMES)}
_NO_OP = 255
_NO_DTYPE = 255
UNEVEN = 1 << 62
"""Added to a count that is the hash of several lengths, and not a number of elements."""


def pack(
    kind: Kind, dtype: torch.dtype | None = None, op: ReduceOp | None = None, root: int | None = None
) -> int:
    """The word META of a control block: kind, reduce operation, dtype and root."""
    op_code = _NO_OP if op is None else op.code
    dtype_code = _NO_DTYPE if dtype is None else DTYPE_CODE[dtype]
    root_code = 0 if root is None else root + 1
    return int(kind) | op_code << 8 | dtype_code << 16 | root_code << 24


def kind_and_unit(meta: int) -> tuple[Kind, int]:
    """The kind that a fingerprint is of, and the bytes per element (1 where there is no dtype)."""
    dtype = meta >> 16 & 0xFF
    return Kind(meta & 0xFF), DTYPES[dtype].itemsize if dtype < len(DTYPES) else 1


def describe(meta: int, count: int) -> str:
    """What a fingerprint says, for people: ``all_reduce(SUM, float32, 1024 elements)``."""
    kind, op, dtype = meta & 0xFF, meta >> 8 & 0xFF, meta >> 16 & 0xFF
    words = []
    if op in _OPS:
        words.append(_OPS[op].name)
    if dtype < len(DTYPES):
        words.append(str(DTYPES[dtype])[6:])
        if count >= UNEVEN:
            words.append("uneven sizes")
        elif count >= 0:
            words.append(f"{count} element{'' if count == 1 else 's'}")
    if meta >> 24:
        words.append(f"root {(meta >> 24) - 1}")
    return f"{Kind(kind).name}({', '.join(words)})"
