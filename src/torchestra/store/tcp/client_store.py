"""A store whose operations are requests to a server, however these reach it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import DistNetworkError, InvalidArgumentError, QueueEmptyError
from torchestra.store.base import (
    Store,
    Value,
    check_amount,
    check_key,
    check_keys,
    check_pairs,
    encode_value,
    missing_keys_error,
)
from torchestra.store.tcp.protocol import Reply, Request
from torchestra.types import Timeout


@checked_methods
class ClientStore(Store):
    """The operations of a store as requests (protocol.py), which a subclass exchanges for replies."""

    def _exchange(self, request: Request, fields: list[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        """Return the code and the fields of the reply to a request, which may wait for ``timeout_s``."""
        raise NotImplementedError

    def set(self, key: str, value: Value) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        fields = [field for key, value in check_pairs(keys, values) for field in (key.encode(), value)]
        self._ask(Request.SET, fields, 0)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.await_values(keys)

    def await_values(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._ask_and_wait(Request.GET, check_keys(keys), self._seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._ask_and_wait(Request.WAIT, check_keys(keys), self._seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        amount = check_amount(amount, self)
        return self._number(Request.ADD, [key.encode(), str(amount).encode()])

    def append(self, key: str, value: Value) -> None:
        check_key(key)
        self._ask(Request.APPEND, [key.encode(), encode_value(value)], 0)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        check_key(key)
        values = [encode_value(expected_value), encode_value(desired_value)]
        return self._ask(Request.COMPARE_SET, [key.encode(), *values])[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Request.CHECK, [key.encode() for key in check_keys(keys)]) == [b"1"]

    def delete_key(self, key: str) -> bool:
        check_key(key)
        return self._ask(Request.DELETE, [key.encode()]) == [b"1"]

    def list_keys(self) -> list[str]:
        try:
            return [key.decode() for key in self._ask(Request.LIST, [], None)]
        except UnicodeDecodeError as error:
            raise invalid_reply(self, str(error)) from None

    def queue_push(self, key: str, value: Value) -> None:
        check_key(key)
        self._ask(Request.PUSH, [key.encode(), encode_value(value)], 0)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        check_key(key)
        if block:
            return self._ask_and_wait(Request.POP, [key], self._seconds(None))[0]
        code, answer = self._request(Request.POP, [b"", key.encode()], self._seconds(None))
        if code == Reply.EMPTY:
            raise QueueEmptyError(f"queue {key!r} of {self} is empty")
        return self._fields(code, answer, 1)[0]

    def queue_len(self, key: str) -> int:
        check_key(key)
        return self._number(Request.QUEUE_LENGTH, [key.encode()])

    def _ask(self, request: Request, fields: list[bytes], count: int | None = 1) -> list[bytes]:
        """Return the fields of the reply; there must be ``count`` of them unless that is None."""
        return self._fields(*self._request(request, fields, self._seconds(None)), count)

    def _ask_and_wait(self, request: Request, keys: list[str], timeout_s: float) -> list[bytes]:
        fields = [milliseconds(timeout_s), *(key.encode() for key in keys)]
        code, answer = self._request(request, fields, timeout_s)
        if code == Reply.MISSING:
            raise missing_keys_error(self, [key.decode(errors="replace") for key in answer], timeout_s)
        return self._fields(code, answer, 0 if request == Request.WAIT else len(keys))

    def _number(self, request: Request, fields: list[bytes]) -> int:
        answer = self._ask(request, fields)[0]
        try:
            return int(answer)
        except ValueError:
            raise invalid_reply(self, f"{answer[:40]!r} in place of a number") from None

    def _request(self, request: Request, fields: list[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        code, answer = self._exchange(request, fields, timeout_s)
        if code == Reply.REFUSED and len(answer) == 1:
            raise InvalidArgumentError(f"{self}: {answer[0].decode(errors='replace')}")
        return code, answer

    def _fields(self, code: int, answer: list[bytes], count: int | None) -> list[bytes]:
        if code != Reply.OK or (count is not None and len(answer) != count):
            raise invalid_reply(self, f"code {code} with {len(answer)} fields")
        return answer


def milliseconds(timeout_s: float) -> bytes:
    """Return the field that tells a server how long to wait."""
    return str(math.ceil(timeout_s * 1000)).encode()


def invalid_reply(server: object, what: str) -> DistNetworkError:
    """Return the error for an invalid reply of a server."""
    return DistNetworkError(
        f"the server of {server} gave an invalid answer ({what}); use the same torchestra on all ranks"
    )
