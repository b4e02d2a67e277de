"""The small public types that every floor speaks in: reduce operations and time-outs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Union

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError

__all__ = ["DEFAULT_TIMEOUT", "ReduceOp", "Timeout", "timeout_seconds"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long an operation of a group may wait for the other ranks when nothing else is said."""

Timeout = Union[timedelta, float, int]
"""A :class:`datetime.timedelta`, or a number of seconds."""


def timeout_seconds(timeout: Timeout) -> float:
    """The duration in seconds.

    Raises:
        InvalidArgumentTypeError: it is neither a timedelta nor a number.
        InvalidArgumentError: it is negative or NaN.
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise InvalidArgumentTypeError(
            "Expected timeout argument to be of type datetime.timedelta, or a number of seconds, got"
            f" {timeout!r}"
        )
    if not seconds >= 0:
        raise InvalidArgumentError(f"timeout must not be negative, got {timeout!r}")
    return seconds


class ReduceOp:
    """How the values of the ranks are combined, element by element.

    ``SUM``, ``AVG`` (the sum divided by the number of ranks), ``PRODUCT``, ``MIN``, ``MAX``, and for
    integers and bool the bitwise ``BAND``, ``BOR``, ``BXOR``. :meth:`premul_sum` makes a sum in which
    this rank's values are first multiplied by a factor (torch's PREMUL_SUM).

    The operations are values: they compare, hash and pickle by name (and factor). ``ReduceOp(op)`` is a copy.
    """

    __slots__ = ("code", "factor", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]

    name: str
    code: int
    factor: float | None

    _NAMES: ClassVar[tuple[str, ...]] = (
        "SUM",
        "AVG",
        "PRODUCT",
        "MIN",
        "MAX",
        "BAND",
        "BOR",
        "BXOR",
        "PREMUL_SUM",
    )

    def __init__(self, name: str | ReduceOp, factor: float | None = None) -> None:
        if isinstance(name, ReduceOp):
            factor = name.factor
            name = name.name
        if name not in self._NAMES:
            raise InvalidArgumentError(
                f"unknown reduce operation {name!r}; known are {', '.join(self._NAMES)}"
            )
        self.name = name
        self.code = self._NAMES.index(name)
        self.factor = factor

    @classmethod
    def premul_sum(cls, factor: float) -> ReduceOp:
        """A sum in which this rank's values are multiplied by ``factor`` before they are added."""
        return cls("PREMUL_SUM", float(factor))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self.code == other.code and self.factor == other.factor

    def __hash__(self) -> int:
        return hash((self.code, self.factor))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" if self.factor is None else f"ReduceOp.premul_sum({self.factor})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.name, self.factor)


for _name in ReduceOp._NAMES:
    setattr(ReduceOp, _name, ReduceOp(_name))
