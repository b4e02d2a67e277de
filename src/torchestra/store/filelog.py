"""The file format of FileStore: a header, then records, only ever appended.

::

    file    = magic number:8 bytes record*
    record  = head crc32(head) key value
    head    = kind:u8  key length:u32  value length:u32  crc32(key value):u32      (big-endian)

The number is random for each file, to tell the file from a later one of the same name.

A writer killed halfway leaves an incomplete record at the end, which :func:`scan` stops at and the next
writer cuts off. The head has a checksum of its own, so that a damaged length is detected, rather
than taken for a long incomplete record, whose removal would take good records with it.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator

MAGIC = b"TSTRFS\x00\x01"
HEADER_SIZE = len(MAGIC) + 8
LONGEST = 2**32 - 1

_HEAD = struct.Struct(">BIII")
_CHECK = struct.Struct(">I")
_HEAD_SIZE = _HEAD.size + _CHECK.size


class Kind(enum.IntEnum):
    """The kind of a record: a change of the table, or a user that joins or leaves."""

    SET = 1
    APPEND = 2
    DELETE = 3
    PUSH = 4
    POP = 5
    JOIN = 6
    LEAVE = 7


class DamagedLogError(Exception):
    """The file has content that FileStore cannot have written."""


def encode(kind: Kind, key: str, value: bytes = b"") -> bytes:
    """Return one record."""
    name = key.encode()
    head = _HEAD.pack(kind, len(name), len(value), zlib.crc32(value, zlib.crc32(name)))
    return b"".join((head, _CHECK.pack(zlib.crc32(head)), name, value))


def scan(data: bytes) -> Iterator[tuple[Kind, str, bytes, int]]:
    """Yield the complete records at the start of ``data``: kind, key, value and end offset.

    Raises:
        DamagedLogError: a record is damaged; the argument is its position.
    """
    start = 0
    while len(data) - start >= _HEAD_SIZE:
        head = data[start : start + _HEAD.size]
        (check,) = _CHECK.unpack_from(data, start + _HEAD.size)
        if zlib.crc32(head) != check:
            raise DamagedLogError(start)
        kind, key_size, value_size, body_check = _HEAD.unpack(head)
        body = start + _HEAD_SIZE
        end = body + key_size + value_size
        if end > len(data):
            return
        key, value = data[body : body + key_size], data[body + key_size : end]
        if zlib.crc32(value, zlib.crc32(key)) != body_check:
            raise DamagedLogError(start)
        yield Kind(kind), key.decode(), value, end
        start = end
