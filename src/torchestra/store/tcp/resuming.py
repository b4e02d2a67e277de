"""What a server remembers of connections that have ended, for clients that resume a request over others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torchestra.store.tcp.peer import Peer
from torchestra.store.tcp.protocol import CHANGES, Outcome, ProtocolError, Reply, number

_MAX_REMEMBERED = 1 << 14
_MAX_ANSWER_BYTES = 4096

Answer = Callable[[int, Sequence[bytes]], Outcome]


class Resuming:
    """The last answers on connections, by their names.

    A connection that a client has lost may still be there for the server, with the request unread. So it is
    dropped before the request is resumed, and nothing is carried out twice.

    Args:
        drop: ends a connection; calls :meth:`end`.
    """

    def __init__(self, drop: Callable[[Peer], None]) -> None:
        self._drop = drop
        self._there: dict[bytes, Peer] = {}
        self._ended: OrderedDict[bytes, tuple[int, Outcome | None]] = OrderedDict()

    def begin(self, peer: Peer) -> None:
        """Note a connection after its handshake."""
        self._there[peer.nonce] = peer

    def end(self, peer: Peer) -> None:
        """Note that a connection has ended; remember its last answer, if it has had its handshake."""
        if self._there.get(peer.nonce) is peer:
            del self._there[peer.nonce]
            self._remember(peer.nonce, peer.answered, peer.last)

    def resume(self, peer: Peer, fields: Sequence[bytes], answer: Answer) -> Outcome:
        """Return the answer to a request that was sent over another connection, carried out once.

        Args:
            answer: carries a request out.

        Raises:
            ProtocolError: the client cannot have sent such a request.
        """
        if len(fields) < 3:
            raise ProtocolError("a request to resume without its fields")
        name, place, code = fields[0], number(fields[1]), number(fields[2])
        former = self._there.get(name)
        if former is peer or code not in CHANGES:
            raise ProtocolError(f"a request to resume request {code}, which cannot be resumed")
        if former is not None:
            self._drop(former)
        if name not in self._ended:
            return Reply.FORGOTTEN, []
        answered, last = self._ended[name]
        if place not in (answered, answered + 1):
            raise ProtocolError(f"a request to resume number {place}, after {answered} that were answered")
        if place > answered:
            last = answer(code, fields[3:])
            self._remember(name, place, kept(last))
        return last if last is not None else (Reply.FORGOTTEN, [])

    def _remember(self, name: bytes, answered: int, last: Outcome | None) -> None:
        self._ended[name] = answered, last
        self._ended.move_to_end(name)
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)


def kept(outcome: Outcome) -> Outcome | None:
    """Return an answer if it is short enough to be remembered, else None."""
    return outcome if sum(map(len, outcome[1])) <= _MAX_ANSWER_BYTES else None
