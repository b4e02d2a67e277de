"""The requests of a store's clients, carried out on its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union

from torchestra.errors import InvalidArgumentError
from torchestra.store.table import PendingPop, PendingWait, Table
from torchestra.store.tcp.protocol import Outcome, ProtocolError, Reply, Request, number

Waker = Callable[[Outcome], bool]


@dataclass(frozen=True)
class Waiting:
    """A parked request: its waker will be called, or the server cancels it after ``timeout_s``."""

    wait: PendingWait | PendingPop
    timeout_s: float


def answer(table: Table, code: int, fields: Sequence[bytes], wake: Waker) -> Outcome | Waiting:
    """Carry out a request.

    Args:
        wake: called with the outcome of a parked request once its keys exist; returns whether the
            client is still there.

    Raises:
        ProtocolError: there is no such request, or its fields are wrong.
    """
    handler = _HANDLERS.get(code)
    if handler is None:
        raise ProtocolError(f"there is no request {code}")
    try:
        return handler(table, fields, wake)
    except InvalidArgumentError as error:
        return Reply.REFUSED, [str(error).encode()]
    except ValueError as error:
        raise ProtocolError(f"request {code} with wrong fields: {error}") from error


def answer_change(table: Table, code: int, fields: Sequence[bytes]) -> Outcome:
    """Carry out a request that changes something, and never waits."""
    outcome = answer(table, code, fields, lambda _: False)
    assert not isinstance(outcome, Waiting)
    return outcome


def _set(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    keys = [key.decode() for key in fields[::2]]
    for key, value in zip(keys, fields[1::2], strict=True):
        table.set(key, value)
    return Reply.OK, []


def _get(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome | Waiting:
    milliseconds, *names = fields
    keys = [name.decode() for name in names]

    def values() -> Outcome:
        return Reply.OK, [value for value in map(table.get, keys) if value is not None]

    timeout_s = number(milliseconds) / 1000
    if not table.missing_values(keys):
        return values()
    return Waiting(table.add_wait(keys, lambda: wake(values()), values_only=True), timeout_s)


def _wait(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome | Waiting:
    milliseconds, *names = fields
    keys = [name.decode() for name in names]
    timeout_s = number(milliseconds) / 1000
    if not table.missing(keys):
        return Reply.OK, []
    return Waiting(table.add_wait(keys, lambda: wake((Reply.OK, [])), values_only=False), timeout_s)


def _add(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    key, amount = fields
    return Reply.OK, [str(table.add(key.decode(), number(amount))).encode()]


def _append(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    key, tail = fields
    table.append(key.decode(), tail)
    return Reply.OK, []


def _compare_set(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    key, expected, desired = fields
    return Reply.OK, [table.compare_set(key.decode(), expected, desired)]


def _check(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    return _truth(not table.missing([key.decode() for key in fields]))


def _delete(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    (key,) = fields
    return _truth(table.delete(key.decode()))


def _list(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    () = fields
    return Reply.OK, [key.encode() for key in table.listed()]


def _push(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    key, value = fields
    table.push(key.decode(), value)
    return Reply.OK, []


def _pop(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome | Waiting:
    milliseconds, name = fields
    key = name.decode()
    timeout_s = number(milliseconds) / 1000 if milliseconds else None
    value = table.pop(key)
    if value is not None:
        return Reply.OK, [value]
    if timeout_s is None:
        return Reply.EMPTY, []
    return Waiting(table.add_pop(key, lambda value: wake((Reply.OK, [value]))), timeout_s)


def _queue_length(table: Table, fields: Sequence[bytes], wake: Waker) -> Outcome:
    (key,) = fields
    return Reply.OK, [str(table.queue_len(key.decode())).encode()]


def _truth(value: bool) -> Outcome:
    return Reply.OK, [b"1" if value else b"0"]


_HANDLERS: dict[int, Callable[[Table, Sequence[bytes], Waker], Union[Outcome, Waiting]]] = {
    Request.SET: _set,
    Request.GET: _get,
    Request.ADD: _add,
    Request.COMPARE_SET: _compare_set,
    Request.CHECK: _check,
    Request.WAIT: _wait,
    Request.DELETE: _delete,
    Request.LIST: _list,
    Request.APPEND: _append,
    Request.PUSH: _push,
    Request.POP: _pop,
    Request.QUEUE_LENGTH: _queue_length,
}
