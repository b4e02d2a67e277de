"""The sockets of a transport, and the wait until they are connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from torchestra.errors import DistNetworkError
from torchestra.transport.endpoint import ZAP_DOMAIN, EndpointRecord
from torchestra.transport.framing import LARGEST_FRAME
from torchestra.transport.listener import HANDSHAKE_SECONDS
from torchestra.transport.pair import FRAMES_IN_ADVANCE, PairConnection

_TICK = 0.002
_RETRY_SECONDS = 0.25


def incoming_socket(context: zmq.Context[Any], address: str, private: bytes) -> zmq.Socket[Any]:
    """Return the socket that all others connect to, which listens nowhere yet."""
    socket: zmq.Socket[Any] = context.socket(zmq.PULL)
    socket.linger = 0
    socket.rcvhwm = FRAMES_IN_ADVANCE
    socket.maxmsgsize = LARGEST_FRAME
    socket.handshake_ivl = HANDSHAKE_SECONDS * 1000
    socket.ipv6 = ":" in address
    socket.zap_domain = ZAP_DOMAIN
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_secretkey = private
    return socket


def outgoing_socket(
    context: zmq.Context[Any], endpoint: EndpointRecord, public: bytes, private: bytes
) -> zmq.Socket[Any]:
    """Return a socket to connect to another rank, with this one's keys."""
    socket: zmq.Socket[Any] = context.socket(zmq.PUSH)
    socket.sndhwm = FRAMES_IN_ADVANCE
    socket.reconnect_ivl = -1
    socket.linger = 0
    socket.ipv6 = endpoint.address.startswith("tcp://[")
    socket.handshake_ivl = HANDSHAKE_SECONDS * 1000
    socket.curve_serverkey = endpoint.key
    socket.curve_publickey = public
    socket.curve_secretkey = private
    return socket


def await_met(
    peers: Sequence[PairConnection],
    name: str,
    names: Mapping[int, str],
    timeout_s: float,
    is_closed: Callable[[], bool],
    advice: str,
) -> None:
    """Wait until this rank is connected to others, and they to it.

    Args:
        name, names: the names of this rank, and of the others.
        is_closed: returns whether the transport has been closed.
        advice: what to do if one cannot be reached, for the error.

    Raises:
        DistNetworkError: one of them does not answer, or does not let this rank in.
    """
    deadline = time.monotonic() + timeout_s
    while waiting := [peer for peer in peers if not peer.is_met]:
        if is_closed():
            raise DistNetworkError("this end was closed")
        late = "no answer in time" if time.monotonic() > deadline else ""
        for peer in waiting:
            if why := peer.end_reason or late or (peer.is_given_up and peer.refused):
                raise DistNetworkError(
                    f"{name} cannot reach {names[peer.rank]}, which is on another host, at"
                    f" {peer.endpoint.address}: {why}. Can this host connect to that address and port?"
                    f" {advice}"
                )
        time.sleep(_TICK)


def await_confirmed(
    posted: Mapping[PairConnection, int],
    timeout_s: float,
    ask: Callable[[PairConnection], None],
    is_unreachable: Callable[[int], bool],
) -> bool:
    """Wait until others have confirmed reliable messages; return whether they have.

    Args:
        posted: by the connection to a rank, the number of the last message to wait for. Messages that are
            posted meanwhile (there is always another ping) are not.
        ask: asks a rank to confirm what has come; called repeatedly, as a question overtakes messages.
        is_unreachable: returns whether a rank will confirm nothing more.
    """
    began, next_question = time.monotonic(), 0.0
    owed = list(posted)
    while owed := [peer for peer in owed if peer.is_owed(posted[peer]) and not is_unreachable(peer.rank)]:
        passed = time.monotonic() - began
        if passed > timeout_s:
            return False
        if passed >= next_question:
            next_question = passed + min(passed + _TICK, _RETRY_SECONDS)
            for peer in owed:
                ask(peer)
        time.sleep(_TICK)
    return True
