"""The messages between the replicas of a store, and the entries of their log, on the wire."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchestra.store.tcp.protocol import ProtocolError

SUBMIT = 32
"""A client's request: session, number, code of the request, its fields (protocol.py)."""
REPLACE = 41
"""A client's request to replace a lost replica, and its entry in the log: see server.py."""
REFRESH = 42
"""A client's request that only has it told where the replicas are, if it has not heard that yet."""
SESSION_BYTES = 16
MAX_REQUEST = 1 << 28
"""How many bytes a request may have, so that some of them together fit into a message between replicas."""

_END = 1 << 63  # no view, entry or incarnation has such a number

_ENTRY = struct.Struct(">16sQBI")
_HEAD = struct.Struct(">IIQQQQIII")


@dataclass(frozen=True)
class Entry:
    """One operation in the log. A read only takes a place there: it has neither session nor fields.

    Attributes:
        session: who asked for it.
        number: the session's number for it, from 1 on; 0 for an operation that may be repeated.
        code, fields: the request, as in protocol.py.
    """

    session: bytes = bytes(SESSION_BYTES)
    number: int = 0
    code: int = 0
    fields: tuple[bytes, ...] = ()

    @property
    def size(self) -> int:
        """Return how many bytes its fields have."""
        return sum(map(len, self.fields))


class Kind(enum.IntEnum):
    """The kinds of messages, by their names in the paper (replica.py)."""

    PREPARE = 33  # append these entries; without any, it is the paper's COMMIT
    PREPARE_OK = 34
    START_VIEW_CHANGE = 35
    DO_VIEW_CHANGE = 36
    GET_STATE = 37
    NEW_STATE = 38
    RECOVERY = 39
    RECOVERY_RESPONSE = 40


KINDS = frozenset(Kind)


@dataclass(frozen=True)
class Message:
    """One message of a replica to another.

    Attributes:
        kind: what it asks or tells.
        sender: the index of the replica that sends it.
        view: the view that the sender is in, or about to enter.
        incarnations: by replica, its latest life that the sender knows of.
        normal_view: the last view in which the sender's status was normal.
        op: the number of the sender's last entry.
        commit: the number of the last entry that the sender has executed.
        entries: those that end with number ``op``.
        snapshot: what the state machine held before the first of ``entries``, if the receiver needs it.
    """

    kind: Kind
    sender: int
    view: int
    incarnations: tuple[int, ...]
    normal_view: int = 0
    op: int = 0
    commit: int = 0
    entries: tuple[Entry, ...] = ()
    snapshot: tuple[bytes, ...] | None = None

    def encode(self) -> list[bytes]:
        """Return the fields of the wire's message, whose code is :attr:`kind`."""
        snapshot = self.snapshot or ()
        head = _HEAD.pack(
            self.sender, len(self.incarnations), self.view, self.normal_view, self.op, self.commit,
            len(self.entries), self.snapshot is not None, len(snapshot),
        )  # fmt: skip
        fields = [head + b"".join(each.to_bytes(8, "big") for each in self.incarnations), *snapshot]
        for entry in self.entries:
            fields.append(_ENTRY.pack(entry.session, entry.number, entry.code, len(entry.fields)))
            fields += entry.fields
        return fields

    @classmethod
    def decode(cls, code: int, fields: Sequence[bytes]) -> Message:
        """Return the message that :meth:`encode` made into ``fields``.

        Raises:
            ProtocolError: it is none.
        """
        rest = iter(fields)
        try:
            head = next(rest)
            sender, count, view, normal_view, op, commit, entries, has_snapshot, size = _HEAD.unpack_from(
                head
            )
            incarnations = struct.unpack_from(f">{count}Q", head, _HEAD.size)
            snapshot = tuple(next(rest) for _ in range(size)) if has_snapshot else None
            appended = tuple(_entry(rest) for _ in range(entries))
            kind = Kind(code)
        except (struct.error, StopIteration, RuntimeError, ValueError) as error:
            raise ProtocolError(f"not a message of a replica: {error}") from None
        if not (commit <= op and len(appended) <= op and max(view, normal_view, op, *incarnations) < _END):
            raise ProtocolError(f"not a message of a replica: entry {op}, {commit} executed, view {view}")
        return cls(kind, sender, view, incarnations, normal_view, op, commit, appended, snapshot)


def _entry(fields: Iterator[bytes]) -> Entry:
    session, number, code, count = _ENTRY.unpack(next(fields))
    return Entry(session, number, code, tuple(next(fields) for _ in range(count)))
