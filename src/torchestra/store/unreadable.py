"""Reading what others have written: what nobody of the job can have written is an error that says so."""

from __future__ import annotations

import binascii
import contextlib
import zlib
from collections.abc import Iterator

from torchestra.errors import DistError, DistStoreError

UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    binascii.Error,
    zlib.error,
)
"""What reading comes to of what nobody of the job can have written."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Read, in the block, what another process has written: ``what``, for the error.

    Raises:
        DistStoreError: it cannot be read.
    """
    try:
        yield
    except DistError:
        raise
    except UNREADABLE as error:
        raise DistStoreError(
            f"{what} cannot be read ({type(error).__name__}: {error!s:.200}): no process of this job writes"
            " such data. Does another job, or another version of torchestra, use the same store?"
        ) from error


def unpacked(packed: bytes, most: int) -> bytes:
    """Decompress what another process has compressed (zlib); ``most``: the bytes that it can have.

    Raises:
        ValueError, zlib.error: it is something else, or more.
    """
    return unpacked_first(packed, most)[0]


def unpacked_first(packed: bytes, most: int) -> tuple[bytes, bytes]:
    """Return the same as :func:`unpacked`, and the bytes after what was decompressed; errors as there."""
    decompress = zlib.decompressobj()
    text = decompress.decompress(packed, most)
    if not decompress.eof:
        raise ValueError(f"it is cut off, or has more than {most} bytes")
    return text, decompress.unused_data
