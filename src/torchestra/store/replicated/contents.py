"""What a store's replicas hold alike: its table, the last answer to each client session, and who has replaced
lost replicas.
"""

from __future__ import annotations

import contextlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torchestra.errors import InvalidArgumentError
from torchestra.store.replicated.addresses import parse_address
from torchestra.store.replicated.messages import REFRESH, REPLACE, SESSION_BYTES, Entry
from torchestra.store.table import Table
from torchestra.store.tcp.protocol import Outcome, ProtocolError, Reply, Request, number
from torchestra.store.tcp.requests import Waiting, Waker, answer

READS = frozenset({Request.GET, Request.CHECK, Request.WAIT, Request.LIST, Request.QUEUE_LENGTH})
"""Requests that change nothing: they may be carried out again, and by one replica alone."""
UNNUMBERED = READS | {REPLACE, REFRESH}
"""Requests that may be made again without harm, though their answer was lost."""
_MAX_SESSIONS = 1 << 16
_MAX_GENERATION = 1 << 15  # as an incarnation has room for: see server.py

_COUNTS = struct.Struct(">IIII")
_SESSION = struct.Struct(f">{SESSION_BYTES}sQBI")


class Contents:
    """The state machine that is replicated.

    A session's requests are numbered, and it makes one at a time. So it is enough to keep the last answer of
    each: a request that comes again, because its answer was lost with a primary, is not carried out again.

    Args:
        table: the values and queues; waits in it are this replica's own.

    Attributes:
        replacements: of replicas that have been replaced, by index: how often, and where the latest listens.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._answered: OrderedDict[bytes, tuple[int, Outcome]] = OrderedDict()
        self.replacements: dict[int, tuple[int, str]] = {}

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

    def replace(self, entry: Entry) -> None:
        """Register who replaces a replica, unless another one has been replaced since that was asked."""
        with contextlib.suppress(ProtocolError, ValueError, StopIteration):  # alike on all replicas
            index, (generation, address) = _replacement(iter(entry.fields))
            if generation == self.replacements.get(index, (0, ""))[0] + 1:
                self.replacements[index] = generation, address

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
        counts = len(values), len(queues), len(self._answered), len(self.replacements)
        fields = [_COUNTS.pack(*counts)]
        for key, value in values.items():
            fields += (key.encode(), value)
        for key, queue in queues.items():
            fields += (key.encode(), str(len(queue)).encode(), *queue)
        for session, (turn, (code, answers)) in self._answered.items():
            fields += (_SESSION.pack(session, turn, code, len(answers)), *answers)
        for index, (generation, address) in self.replacements.items():
            fields += replacement_fields(index, generation, address)
        return tuple(fields)

    def restore(self, snapshot: tuple[bytes, ...]) -> None:
        """Hold what a :meth:`snapshot` has, and nothing else.

        Raises:
            ProtocolError: it is none; then nothing has changed.
        """
        rest = iter(snapshot)
        try:
            values, queues, sessions, replaced = _COUNTS.unpack(next(rest))
            table = dict(_named(rest) for _ in range(values))
            waiting = {key: _taken(rest, number(size)) for key, size in (_named(rest) for _ in range(queues))}
            answered = OrderedDict(_session(rest) for _ in range(sessions))
            replacements = dict(_replacement(rest) for _ in range(replaced))
        except (struct.error, StopIteration, RuntimeError, ValueError) as error:
            raise ProtocolError(f"not the state of a replica: {error}") from None
        self._table.load(table, waiting)
        self._answered, self.replacements = answered, replacements


def replacement_fields(index: int, generation: int, address: str) -> tuple[bytes, ...]:
    """Return the fields of a :data:`REPLACE` entry.

    Args:
        index: which replica is replaced.
        generation: how often, counting this time.
        address: where the new one listens, as ``host:port``.
    """
    return str(index).encode(), str(generation).encode(), address.encode()


def _replacement(fields: Iterator[bytes]) -> tuple[int, tuple[int, str]]:
    index, generation, address = number(next(fields)), number(next(fields)), next(fields).decode()
    try:
        parse_address(address)
    except InvalidArgumentError as error:
        raise ProtocolError(str(error)) from None
    if not 0 < generation < _MAX_GENERATION or index < 0:
        raise ProtocolError(f"replica {index} replaced {generation} times")
    return index, (generation, address)


def _no_client(outcome: Outcome) -> bool:
    return False


def _named(fields: Iterator[bytes]) -> tuple[str, bytes]:
    return next(fields).decode(), next(fields)


def _taken(fields: Iterator[bytes], count: int) -> list[bytes]:
    return [next(fields) for _ in range(count)]


def _session(fields: Iterator[bytes]) -> tuple[bytes, tuple[int, Outcome]]:
    session, turn, code, count = _SESSION.unpack(next(fields))
    return session, (turn, (Reply(code), _taken(fields, count)))
