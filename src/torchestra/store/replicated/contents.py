"""What a store's replicas hold alike: its table, and the last answer to each client session."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torchestra.store.replicated.messages import SESSION_BYTES, Entry
from torchestra.store.table import Table
from torchestra.store.tcp.protocol import Outcome, ProtocolError, Reply, Request, number
from torchestra.store.tcp.requests import Waiting, Waker, answer

READS = frozenset({Request.GET, Request.CHECK, Request.WAIT, Request.LIST, Request.QUEUE_LENGTH})
"""Requests that change nothing: they may be carried out again, and by one replica alone."""
_MAX_SESSIONS = 1 << 16

_COUNTS = struct.Struct(">III")
_SESSION = struct.Struct(f">{SESSION_BYTES}sQBI")


class Contents:
    """The state machine that is replicated.

    A session's requests are numbered, and it makes one at a time. So it is enough to keep the last answer of
    each: a request that comes again, because its answer was lost with a primary, is not carried out again.

    Args:
        table: the values and queues; waits in it are this replica's own.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._answered: OrderedDict[bytes, tuple[int, Outcome]] = OrderedDict()

    def change(self, entry: Entry) -> Outcome:
        """Carry out a request that changes something, unless it has been carried out."""
        turn, outcome = self._answered.get(entry.session, (0, (Reply.OK, [])))
        if entry.number > turn + 1:
            return Reply.REFUSED, [b"its session has been forgotten, for so many others were used since"]
        if entry.number == turn + 1:
            outcome = self._outcome(entry.code, entry.fields, _no_client)
            self._answered[entry.session] = entry.number, outcome
        self._answered.move_to_end(entry.session)
        if len(self._answered) > _MAX_SESSIONS:
            self._answered.popitem(last=False)
        return outcome

    def read(self, code: int, fields: Sequence[bytes], wake: Waker) -> Outcome | Waiting:
        """Answer a request that changes nothing (``wake``: see requests.py)."""
        try:
            return answer(self._table, code, fields, wake)
        except ProtocolError as error:
            return Reply.REFUSED, [str(error).encode()]

    def _outcome(self, code: int, fields: Sequence[bytes], wake: Waker) -> Outcome:
        outcome = self.read(code, fields, wake)
        if isinstance(outcome, Waiting):  # a pop that waits would be answered by one replica alone
            self._table.cancel(outcome.wait)
            return Reply.EMPTY, []
        return outcome

    def snapshot(self) -> tuple[bytes, ...]:
        """Return all of it, as fields."""
        values, queues = self._table.dump()
        fields = [_COUNTS.pack(len(values), len(queues), len(self._answered))]
        for key, value in values.items():
            fields += (key.encode(), value)
        for key, queue in queues.items():
            fields += (key.encode(), str(len(queue)).encode(), *queue)
        for session, (turn, (code, answers)) in self._answered.items():
            fields += (_SESSION.pack(session, turn, code, len(answers)), *answers)
        return tuple(fields)

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        """Hold what a :meth:`snapshot` has, and nothing else.

        Raises:
            ProtocolError: it is none; then nothing has changed.
        """
        rest = iter(snapshot)
        try:
            values, queues, sessions = _COUNTS.unpack(next(rest))
            table = dict(_named(rest) for _ in range(values))
            waiting = {key: _taken(rest, number(size)) for key, size in (_named(rest) for _ in range(queues))}
            answered = OrderedDict(_session(rest) for _ in range(sessions))
        except (struct.error, StopIteration, RuntimeError, ValueError) as error:
            raise ProtocolError(f"not the state of a replica: {error}") from None
        self._table.load(table, waiting)
        self._answered = answered


def _no_client(outcome: Outcome) -> bool:
    return False


def _named(fields: Iterator[bytes]) -> tuple[str, bytes]:
    return next(fields).decode(), next(fields)


def _taken(fields: Iterator[bytes], count: int) -> list[bytes]:
    return [next(fields) for _ in range(count)]


def _session(fields: Iterator[bytes]) -> tuple[bytes, tuple[int, Outcome]]:
    session, turn, code, count = _SESSION.unpack(next(fields))
    return session, (turn, (Reply(code), _taken(fields, count)))
